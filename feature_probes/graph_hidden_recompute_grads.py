"""Probe Megatron's local CUDA graphs for gradients that are lost where `CheckpointWithoutOutput` recomputes.

A graph's backward pass gives gradients to the parameters that are found by walking back from what the forward pass returned. What
`CheckpointWithoutOutput` runs is not on that way: it runs without gradients, and once more in a hook. Parameters that only it uses are
not found, and keep gradients of zero.

    up to 0.8.0             no local graphs: ABSENT
    0.9.0 to 0.15.3         a graph is given every parameter, and recomputing in it is an error: ABSENT
    0.16.0 to 0.19.2        not found: BROKEN
    main since 2026-08-14   found in a warm-up without recompute (#6373): FIXED
    dev                     not found, and nobody read what else it recomputes: UNRECOGNISED

The seam is where a layer is made, before that reads from its configuration what it recomputes. What is captured, and what a configuration
says of it, must be as it was read; the modules of graphs and configurations set names that are known to the running code alone, and are
compared as a whole.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6373
"""

from __future__ import annotations

from megacpp_overlays.feature_probes.definitions import plain_class, plain_function
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import judged, meaning, table
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.trees import SourceTree

CLASS = "TransformerLayer"
METHOD = f"{CLASS}.__init__"
TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.transformer_layer", symbol=METHOD)
GRAPHS = "megatron.core.transformer.cuda_graphs"
CONFIG = "megatron.core.transformer.transformer_config"
RANDOM = "megatron.core.tensor_parallel.random"
NOT_FOUND = "not-found"

_REPAIR = "needs_recompute_param_discovery"
_PLACES = (f"{GRAPHS}:", f"{RANDOM}:CheckpointWithoutOutput", f"{RANDOM}:CheckpointWithoutOutputFunction")
_SEEN_BY_THE_SEAM = (
    f"{CONFIG}:",
    f"{TARGET.module}:{METHOD}",
    f"{TARGET.module}:{CLASS}.create_mcore_cudagraph_manager",
    f"{TARGET.module}:MoETransformerLayer.__init__",
    f"{TARGET.module}:MoETransformerLayer.create_mcore_cudagraph_manager",
)
_CHECKPOINT = "57853d3de6b45a5c 1bd51e048943eb35"
_GIVEN_EVERY_PARAMETER = {
    "22984f369c997675": "0.9.0 and 0.10.0",
    "0c9f860d881bc68e": "0.11.0",
    "09d59f87e657a703": "0.12.0 to 0.12.3",
    "80cb404deb5fd52d": "0.13.0 and 0.13.1",
    "d68b08bea2762bfd": "0.14.0",
    "65aa9fbcb0e53b3b": "0.15.0 to 0.15.3",
}
"""What stands in the module of graphs."""
_GRAPHS_OF_17, _LAYERS_OF_17 = (
    f"3db99a15e9cfe9e9 {_CHECKPOINT}",
    "7373db153bf65fad 7717bec119a4ca61 dbbeb83487b191ba 6f44c33ed3943909",
)
_GRAPHS_OF_19 = f"c38cdc370a4cba33 {_CHECKPOINT}"
_KNOWN = {
    "4651565ea90a063c 9b594c6e390a5058 3b542a07f56f7c3f "
    "66d8443bc49fa46c 002b6b88ad8d2275 0c145dde3e7b2223 a0cca867d13bef49 086ed1299002dd16": "0.16.0 and 0.16.1",
    f"{_GRAPHS_OF_17} 0ba8447882dd128c {_LAYERS_OF_17}": "0.17.0",
    f"{_GRAPHS_OF_17} 796b6e3161930d2a {_LAYERS_OF_17}": "0.17.1",
    f"31ba069afcf33d75 {_CHECKPOINT} "
    "05ddcc7f19c2405e dd1b6f9202430105 d82791239c612439 40c8659ffeba0881 3371e84f554e5e02": "0.18.0 to 0.18.2",
    f"{_GRAPHS_OF_19} "
    "3b165b7995494406 1c88fdf7a1ff93d0 fc4ba6fe9708845b ef921b6b7de2ef1b ca6fa52234d8cdad": "0.19.0 and 0.19.1",
    f"{_GRAPHS_OF_19} 3b165b7995494406 8aff911b683dc8a0 44b79033f126a79a ef921b6b7de2ef1b ca6fa52234d8cdad": "0.19.2",
}
"""What stands in all of these places."""
_REPAIRED = table(
    _PLACES,
    {
        "main 814300c879 (2026-08-14)": f"05ec32565c5ea73e {_CHECKPOINT}",
        "main d98e8a64dd (2026-08-22)": "697eebc4b136b130 146e6a76730e2e89 bbca0f10ca8e55c8",
    },
)


def probe(tree: SourceTree) -> Finding:
    """Return whether graphs find the parameters that only recomputed code uses."""
    source, graphs = tree.module(TARGET.module), tree.module(GRAPHS)
    if source is None:
        return absent(f"there is no module {TARGET.module}")
    if (cls := plain_class(source, CLASS)) is None:
        return absent(f"defines no {CLASS}", source)
    if (method := plain_function(source, METHOD)) is None:
        raise unknown(source, cls, f"{CLASS} has no constructor")
    layer = [meaning(tree, each) for each in _SEEN_BY_THE_SEAM]  # what cannot be read may be anything
    if graphs is None:
        return absent("there are no local CUDA graphs", source)
    found = [meaning(tree, each) for each in _PLACES]
    if (older := _GIVEN_EVERY_PARAMETER.get(found[0])) is not None:
        return absent(f"a graph is given every parameter, as in {older}", graphs)
    if _REPAIR in graphs.text:
        seen = "graphs look for parameters without recompute"
        return judged(tree, _REPAIRED, at(graphs, graphs.syntax, seen), places=_PLACES)
    if (read_in := _KNOWN.get(" ".join([*found, *layer]))) is None:
        raise unknown(source, method, f"nobody read this: {' '.join([*found, *layer])}")
    return broken(NOT_FOUND, at(source, method, f"graphs do not find what only recomputed code uses, as in {read_in}"))
