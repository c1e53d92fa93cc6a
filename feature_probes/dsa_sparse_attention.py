"""Probe DSA's absorbed attention without fused kernels for scores of all queries, heads and keys.

`_unfused_absorbed_dsa_fn` is the attention of every absorbed layer where `dsa_kernel_backend` is none, the default, and
wherever a backend declines. It multiplies every query with every key, masks what the indexer did not choose, and takes a
softmax over all keys, in float32.

    up to 0.15.3                 no DSA: ABSENT
    0.16.0 to 0.18.2             no absorbed attention: ABSENT
    main of 2026-06-25           an earlier form, whose softmax divides by 0 where nothing was chosen: UNRECOGNISED
    0.19.0 to 0.19.2, main, dev  BROKEN

The seam computes the function whole, so it stands for the masks that the function asks of `dsa_masking` as well, and all
of them must be ones that were read. No repair has been seen: what multiplies nothing any more looks repaired.

Source: https://github.com/NVIDIA/Megatron-LM/pull/5246
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from megacpp_overlays.feature_probes.definitions import called, plain_function, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import Repairs, judged, meaning
from megacpp_overlays.model import Evidence, Finding, Target
from megacpp_overlays.source.trees import FunctionNode, ModuleSource, SourceTree

_VARIANT = "megatron.core.transformer.experimental_attention_variant"
FUNCTION = "_unfused_absorbed_dsa_fn"
TARGET = Target(distribution="megatron-core", module=f"{_VARIANT}.dsa", symbol=FUNCTION)
MASKING = f"{_VARIANT}.dsa_masking"
ALL_KEYS = "scores-of-all-keys"

_PLACES = (
    f"{TARGET.module}:{FUNCTION}",
    f"{MASKING}:prepare_sparse_mask_context",
    f"{MASKING}:scatter_topk_into_index_mask",
    f"{MASKING}:apply_sparse_validity_to_index_mask",
    f"{MASKING}:masked_softmax",
)
"""The function, and all that it asks of another module."""
_BROKEN = {
    "c91b99ad07743a0e 002c4d069c22d943 dafca31df15acaf1 16a5b55a3a7f33d6 0a66b454afef8a9f": (
        "0.19.0 to 0.19.2, main d98e8a64dd and dev d48bd6be0a"
    ),
}
_REPAIRED: Repairs = {}
"""No repair was read yet."""

_PRODUCTS = {"matmul", "einsum", "bmm", "baddbmm", "mm", "tensordot", "scaled_dot_product_attention"}


def probe(tree: SourceTree) -> Finding:
    """Return whether absorbed attention goes through scores of (batch, heads, queries, keys)."""
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no module {TARGET.module}")
    function = plain_function(source, FUNCTION)
    if function is None:
        return _without_function(source)
    found = " ".join(meaning(tree, place) for place in _PLACES)
    if (read_in := _BROKEN.get(found)) is not None:
        product = next(_products(function), function)
        seen = at(source, product, f"{FUNCTION} builds [batch, heads, queries, keys] in float32")
        return broken(ALL_KEYS, seen, Evidence(seen=f"as in {read_in}"))
    if next(_products(function), None) is None:
        nothing = at(source, function, f"{FUNCTION} multiplies nothing itself")
        return judged(tree, _REPAIRED, nothing, places=_PLACES)
    raise unknown(source, function, f"nobody read {FUNCTION} and its masks as they are: {found}")


def _without_function(source: ModuleSource) -> Finding:
    """Return ABSENT only where there is no absorbed attention: what moved or got another name is not gone."""
    named = sorted(word for word in words(source.syntax) if "absorbed" in word.lower())
    if named:
        raise unknown(source, None, f"there is {named[0]}, but no {FUNCTION}")
    return absent(f"defines no {FUNCTION}", source)


def _products(function: FunctionNode) -> Iterator[ast.AST]:
    """Yield what may multiply queries with keys."""
    return (node for node in ast.walk(function) if _multiplies(node))


def _multiplies(node: ast.AST) -> bool:
    match node:
        case ast.Call():
            return called(node) in _PRODUCTS
        case ast.BinOp(op=ast.MatMult()):
            return True
    return False
