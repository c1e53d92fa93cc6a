"""Probe `fully_shard_optimizer` of the Megatron-FSDP in megatron-core for a step with the optimizer that it prepares.

It lets the optimizer step once with gradients of zero, so that there is state for a checkpoint to be loaded into. Weights decay in that
step, and it counts.

    up to 0.16.1            no such step: ABSENT
    0.17.0 to 0.19.2, dev   one that counts: BROKEN
    main since 2026-07-30   one without learning rate and decay, which is not counted (#5976): FIXED

The seam answers for the optimizer's `step` while upstream's function runs, and counts on that step being the only one there.

Source: https://github.com/NVIDIA/Megatron-LM/issues/5974, https://github.com/NVIDIA/Megatron-LM/pull/5976
"""

from __future__ import annotations

from megacpp_overlays.feature_probes.definitions import calls
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import judged, meaning, table
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.trees import SourceTree

FUNCTION = "fully_shard_optimizer"
TARGET = Target(
    distribution="megatron-core",
    module="megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard",
    symbol=FUNCTION,
)
COUNTED = "counted"

_PLACES = (f"{TARGET.module}:{FUNCTION}",)
_WITHOUT = {"87339eb372b25e2c": "0.14.0 to 0.15.1", "2c5b85769c3ba0db": "0.15.2 to 0.16.1"}
"""What prepares an optimizer and takes no step with it."""
_COUNTED = {"f11eaf7a29f5f0ea": "0.17.0 to 0.19.2 and dev d48bd6be0a"}
_REPAIRED = table(_PLACES, {"main ce8a8a736f (2026-07-30) to d98e8a64dd": "430faac7ae8af1a6"})


def probe(tree: SourceTree) -> Finding:
    """Return whether the step that builds an optimizer's state is one like any other."""
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no {TARGET.module}")
    if (function := source.function(FUNCTION)) is None:
        return absent(f"defines no {FUNCTION}", source)
    body = meaning(tree, _PLACES[0])
    if (read_in := _WITHOUT.get(body)) is not None:
        return absent(f"no step is taken to build state, as in {read_in}", source)
    if (read_in := _COUNTED.get(body)) is not None:
        seen = f"the step that builds an optimizer's state decays weights and counts, as in {read_in}"
        return broken(COUNTED, at(source, function, seen))
    if calls(function, "update") or calls(function, "zero_"):
        return judged(tree, _REPAIRED, at(source, function, "something is put back around a step"), places=_PLACES)
    raise unknown(source, function, f"nobody read {FUNCTION} as it is: {body}")
