"""Probe a router's token counts by expert, which its bias follows, for padding that is masked along the wrong axis.

`TopKRouter._apply_expert_bias` takes a mask of tokens for one of experts. Where there are other numbers of either, a training step
with a padding mask ends in an error; where they are equal, experts lose counts and padding is counted.

    up to 0.15.3            counts no padding mask: ABSENT
    0.16.0 to 0.19.2        a mask of tokens is laid over experts: BROKEN. Main as well, until 2026-08-19
    main since 2026-08-20   over tokens (#6114): FIXED. Dev since 2026-06-26, in another way

The seam takes padding out of the map before upstream counts it, and gives upstream no mask. So the method must be one that was read, with
what calls it.

Source: https://github.com/NVIDIA/Megatron-LM/issues/6111
"""

from __future__ import annotations

import ast

from megacpp_overlays.feature_probes.definitions import called, plain_class, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import judged, meaning, table
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.trees import SourceTree

ROUTER = "TopKRouter"
COUNT = f"{ROUTER}._apply_expert_bias"
TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.moe.router", symbol=COUNT)
OVER_EXPERTS = "mask-over-experts"

_MASK = "padding_mask"
_PLACES = (f"{TARGET.module}:{COUNT}", f"{TARGET.module}:{ROUTER}.routing")
_KNOWN = {
    "91ca44abe73e4390 8ca6fe1a9ab7f6ca": "0.16.0 and 0.16.1",
    "91ca44abe73e4390 93ba5cbef1c8e268": "0.17.0 and 0.17.1",
    "91ca44abe73e4390 c5bb76cb86da07ad": "0.18.0 to 0.18.2",
    "641f9a8e413904fc 82aad988da3bbc5c": "0.19.0 to 0.19.2, main until 2026-08-19",
}
_REPAIRED = table(
    _PLACES,
    {
        "main 723db5a727 (2026-08-20) to d98e8a64dd": "29eead0141f7d9fb 82aad988da3bbc5c",
        "dev d1384c2d95 (2026-07-14) to d48bd6be0a": "c7932a648d1f79df 9b8d3ec574be1a51",
        "dev 056d9c0f24 (2026-06-26)": "c7932a648d1f79df c7c56442960d8aed",
    },
)


def probe(tree: SourceTree) -> Finding:
    """Return whether a mask of tokens is laid over experts."""
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no module {TARGET.module}")
    method = source.function(COUNT) if plain_class(source, ROUTER) is not None else None
    if method is None:
        if _MASK in source.text:
            raise unknown(source, None, f"there is no {COUNT}, and {_MASK} is mentioned")
        return absent(f"defines no {COUNT}", source)
    if _MASK not in words(method):
        raise unknown(source, method, f"{COUNT} takes no {_MASK}")
    found = [meaning(tree, where) for where in _PLACES]
    if (read_in := _KNOWN.get(" ".join(found))) is not None:
        return broken(OVER_EXPERTS, at(source, method, f"a mask of tokens is laid over experts, as in {read_in}"))
    if any(_widened(each) for each in ast.walk(method)):
        return judged(tree, _REPAIRED, at(source, method, "the mask has an axis of experts"), places=_PLACES)
    raise unknown(source, method, f"nobody read {COUNT} {found[0]} with {ROUTER}.routing {found[1]}")


def _widened(node: ast.AST) -> bool:
    """Return whether an axis is put to something."""
    return isinstance(node, ast.Call) and called(node) == "unsqueeze"
