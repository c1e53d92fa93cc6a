"""Probe the offsets at which `DistributedOptimizer` cuts a parameter's state out of its gathered buffer, for a fully reshardable checkpoint.

`get_parameter_state_dp_zero` gathers the buckets of a grad buffer one behind the other, without the padding at their ends.
`param_index_map` counts that padding. The releases 0.15.0 to 0.19.2 and dev cut with its numbers as they are, so every
parameter behind the first padded bucket gets elements of those behind it, and the last ones zeros. Main subtracts the
padding that was left out since 2026-08-21. Releases up to 0.14.0 have no such format.
"""

from __future__ import annotations

from megacpp_overlays.feature_probes.definitions import plain_class
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown, unrecognised
from megacpp_overlays.feature_probes.known_bodies import changed_method, plain_subclass
from megacpp_overlays.feature_probes.repairs import judged, table
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.patterns import Pattern
from megacpp_overlays.source.trees import FunctionNode, SourceTree

TARGET = Target(
    distribution="megatron-core",
    module="megatron.core.optimizer.distrib_optimizer",
    symbol="DistributedOptimizer",
)

PADDED_SLICES = "padded-slices"

SAVE = "sharded_param_state_fully_reshardable"
LOAD = "load_parameter_state_from_fully_reshardable"
_GATHER = "get_parameter_state_dp_zero"
_BASES = "megatron.core.optimizer.optimizer"
_KNOWN = {
    SAVE: frozenset({"5206d6976f0b3923"}),
    _GATHER: frozenset({"75f306b9113a8eda", "c83d2cf4cf1ecafe"}),  # 0.15.0 to 0.18.2 and dev; 0.19.0 to 0.19.2
    LOAD: frozenset({"f6fa12631211e241"}),
}
"""Bodies of the releases from 0.15.0 to 0.19.2, of dev up to d48bd6be0a and of main before the repair."""

_REPAIRED = table(
    tuple(f"{TARGET.module}:{TARGET.symbol}.{name}" for name in (SAVE, _GATHER, LOAD)),
    {"main 32a03b77c5 (2026-08-21) to d98e8a64dd": "ae217f033c5be4a3 1ccfebbdfa66329c a8efba53d3fb3d8d"},
)
"""Every commit of main with the repair: who cuts, who packs what is cut, and who takes it apart again."""

_WALK = Pattern("for $param, ($start, $end, $bucket) in buffer.param_index_map.items(): $$_")
_SHIFTED = Pattern("$_ = $start - $_")


def probe(tree: SourceTree) -> Finding:
    """Return whether slices are taken with the numbers of the padded buffer.

    Source: https://github.com/NVIDIA/Megatron-LM/pull/5077
    """
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no module {TARGET.module}")
    if plain_class(source, TARGET.symbol) is None:
        return absent(f"defines no {TARGET.symbol}", source)
    cls = plain_subclass(source, TARGET.symbol, base="MixedPrecisionOptimizer")
    if not source.bindings.of(f"{TARGET.symbol}.{SAVE}"):
        base = tree.module(_BASES)
        if any(SAVE in each.text for each in (source, base) if each is not None):
            raise unknown(source, cls, f"{SAVE} is mentioned, and {TARGET.symbol} does not define it")
        return absent(f"{TARGET.symbol} has no fully reshardable format", source)
    save = source.function(f"{TARGET.symbol}.{SAVE}")
    if save is None:
        raise unknown(source, cls, f"{TARGET.symbol}.{SAVE} is no plain method")
    if _subtracts(save):
        return judged(tree, _REPAIRED, at(source, save, "the padding that was left out is subtracted"))
    if (surprise := changed_method(source, TARGET.symbol, _KNOWN)) is not None:
        return unrecognised(surprise)
    return broken(
        PADDED_SLICES, at(source, save, "a buffer without padding is cut with the numbers of one that has it")
    )


def _subtracts(save: FunctionNode) -> bool:
    """Return whether the walk over the parameters subtracts something from where each begins."""
    return any(
        shift.text("start") == walk.text("start") for walk in _WALK.find(save) for shift in _SHIFTED.find(walk.node)
    )
