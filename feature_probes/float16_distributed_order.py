"""Order in which `DistributedOptimizer` records the positions of parameters, and in which it installs them.

Its constructor records the position of each parameter in grad-buffer order, then installs each group as fp32 shards
first, copies of float16 shards after them. With both kinds in one group the two orders differ. Restoring state also
copies into a view of an fp32 parameter that autograd tracks. Releases 0.13.0 to 0.19.2 and main have both; dev has
repaired both since 2026-07-18.
"""

from __future__ import annotations

from megacpp_overlays.feature_probes.definitions import plain_class
from megacpp_overlays.feature_probes.findings import absent, at, broken, unrecognised
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

STALE_ORDER = "stale-order"

_RESTORE = "_set_main_param_and_optimizer_states"
_KNOWN = {
    "__init__": frozenset({"3b39cbefbe8ade4b", "cca4de6ad5de5751", "9f50f2924ad6a1bc", "4fd22571854dfc5f"}),
    "_build_optimizer_group_ranges": frozenset({"48d30b433dd47413"}),
    "_build_model_and_main_param_groups": frozenset(
        {"d3b9ec843d7b5fe0", "189aa2fd2b7cee02", "cddbef4c0da0fb8d", "27725fe072b02207"}
    ),
    "_get_main_param_and_optimizer_states": frozenset({"1f985891d60ba90d", "b3ebdb49fee2a4f9", "ebff2424af03350f"}),
    _RESTORE: frozenset({"d1660ba11e6b8294", "2097a2ad2385a1c1", "f014b8476ec8181a"}),
}
"""Bodies of the releases from 0.13.0 to 0.19.2; main d98e8a64dd has those of 0.19.2."""

_POSITIONS = "model_param_group_index_map"
_REPAIRED = table(
    (
        *(
            f"{TARGET.module}:{TARGET.symbol}.{name}"
            for name in ("__init__", "_build_optimizer_group_ranges", "_build_model_and_main_param_groups")
        ),
        f"{TARGET.module}:*{_POSITIONS}",
    ),
    {
        "dev ceaa6c5d7e (2026-07-18)": "df0d0b1358c08ade 8e466fe6e561be7f 7789f2fc59c0751d de656c7adeae66f5",
        "dev 9050d4c5fb (2026-08-18) to d48bd6be0a": "7c5c940d81f5ee46 42d0fbcbc846bbd5 b7533cf5f83f9307 1917431316a95f84",
    },
)
"""Every commit of dev with the repair: who records positions, who builds the groups, and everybody who reads positions."""

_LOOP = Pattern("for $_ in $groups: $$_")
_GROUPS = (Pattern("self.model_fp32_groups"), Pattern("self.model_float16_groups"))
_RECORD = Pattern(f"self.{_POSITIONS}[$_] = $_")
_UNTRACKED = Pattern("with torch.no_grad(): $$_")
_COPY = Pattern("$_.copy_($$_)")


def probe(tree: SourceTree) -> Finding:
    """Return whether the recorded positions are those of the installed groups.

    Source: https://github.com/NVIDIA/Megatron-LM/issues/2777 and /pull/5835
    """
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no module {TARGET.module}")
    if plain_class(source, TARGET.symbol) is None:
        return absent(f"defines no {TARGET.symbol}", source)
    cls = plain_subclass(source, TARGET.symbol, base="MixedPrecisionOptimizer")
    init, restore = (source.function(f"{TARGET.symbol}.{name}") for name in ("__init__", _RESTORE))
    if init and restore and _records_again(init) and _restores_without_autograd(restore):
        return judged(tree, _REPAIRED, at(source, init, "positions are recorded again after the groups are built"))
    if (surprise := changed_method(source, TARGET.symbol, _KNOWN)) is not None:
        return unrecognised(surprise)
    return broken(
        STALE_ORDER, at(source, init or cls, "positions are recorded before each group is reordered by dtype")
    )


def _records_again(init: FunctionNode) -> bool:
    """Return whether positions are recorded in a loop over the fp32 and the float16 groups."""
    loops = [loop for statement in init.body if (loop := _LOOP.match(statement)) is not None]
    return any(
        any(_RECORD.find(loop.node)) and all(any(group.find(loop["groups"])) for group in _GROUPS) for loop in loops
    )


def _restores_without_autograd(restore: FunctionNode) -> bool:
    """Return whether there are copies, and all of them happen under `torch.no_grad()`."""
    copies = {id(copy.node) for copy in _COPY.find(restore)}
    untracked = {id(copy.node) for scope in _UNTRACKED.find(restore) for copy in _COPY.find(scope.node)}
    return bool(copies) and copies == untracked
