"""Probe `fully_shard_optimizer` of the Megatron-FSDP in megatron-core for a step with the optimizer that it prepares.

It lets the optimizer step once with gradients of zero, so that there is state for a checkpoint to be loaded into. Weights decay in that
step, and it counts: in the releases 0.17.0 to 0.19.2 and dev. Up to 0.16.1 there is no such step. Main takes one without learning rate and
decay since 2026-07-30, which is not counted (#5976).

The seam replaces the optimizer's `step` while upstream's function runs, and assumes that the function takes only this step.

The verdict rests on that function, its decorator, and its imports.

Source: https://github.com/NVIDIA/Megatron-LM/issues/5974, https://github.com/NVIDIA/Megatron-LM/pull/5976
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

FUNCTION = "fully_shard_optimizer"
TARGET = Target("megatron-core", "megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard", FUNCTION)
COUNTED = "counted"

_ABSENT_WITHOUT = {f"{TARGET.module}:{FUNCTION}": f"defines no {FUNCTION}"}


def probe(tree: SourceTree) -> Finding:
    """Return whether the step that builds an optimizer's state is one like any other."""
    return forms.finding("fsdp-optimizer-under-update", TARGET, tree, _ABSENT_WITHOUT)
