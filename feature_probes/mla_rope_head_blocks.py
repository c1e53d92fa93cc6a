"""Blocks of heads that Megatron's fused rotary kernels of multi-latent attention are tuned over, and what they do at the ends.

A program of such a kernel rotates BLOCK_H heads of one token, and the tuner tries 1 to 128. Two defects come with that:

    the last block      its mask compares an offset in the block with all heads, whichever block it is. Where BLOCK_H is
                        smaller than the heads and does not divide them, the first heads of the next token are rotated
                        twice, or added up, and numbers behind the tensor are written: also while the tuner tries what it
                        does not take
                        (https://github.com/NVIDIA/Megatron-LM/issues/7103)
    in place            queries are loaded in one order and stored in another, and nothing makes the warps of a program wait
                        for each other (https://github.com/NVIDIA/Megatron-LM/issues/4640)

    up to 0.12.3                          no such kernels: ABSENT
    0.13.0 to 0.19.2                      BROKEN, in kernels named after queries and keys
    main since 2026-08-17, dev            BROKEN, in kernels for any tensor

The seam calls upstream's launches with other configurations of the tuner. What a launch passes, and which numbers a program
reads, decides whether these are right, so the whole module must be one that was read.
"""

from __future__ import annotations

from typing import NamedTuple

from megacpp_overlays.feature_probes import cpp_source
from megacpp_overlays.feature_probes.findings import absent, broken, unknown
from megacpp_overlays.feature_probes.repairs import Repairs, judged, meaning
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import knowledge
from megacpp_overlays.source.trees import SourceTree

MODULE = "megatron.core.fusions.fused_mla_yarn_rope_apply"
TARGET = Target(distribution="megatron-core", module=MODULE, symbol="ApplyMLARotaryEmbQ")
OF_QUERIES, OF_ANY = "queries-and-keys", "any-tensor"


class Launch(NamedTuple):
    """A function that launches a kernel."""

    symbol: str
    kernel: str
    in_place: bool


LAUNCHES = {
    OF_QUERIES: (
        Launch("ApplyMLARotaryEmbQ.forward", "rotary_fwd_q_kernel", in_place=True),
        Launch("ApplyMLARotaryEmbQ.backward", "rotary_bwd_q_kernel", in_place=True),
        Launch("ApplyMLARotaryEmbKV.forward", "rotary_fwd_kv_kernel", in_place=False),
        Launch("ApplyMLARotaryEmbKV.backward", "rotary_bwd_kv_kernel", in_place=False),
    ),
    OF_ANY: (
        Launch("_FusedMLARoPEInplace.forward", "_mla_rope_fwd_inplace_kernel", in_place=True),
        Launch("_FusedMLARoPEInplace.backward", "_mla_rope_bwd_inplace_kernel", in_place=True),
        Launch("_FusedMLARoPEKVSplit.forward", "_mla_rope_fwd_kv_split_kernel", in_place=False),
        Launch("_FusedMLARoPEKVSplit.backward", "_mla_rope_bwd_kv_split_kernel", in_place=False),
    ),
}
"""By shape."""
_KNOWN = {
    "84d4abd09bdeb9db": (OF_QUERIES, "0.13.0 and 0.13.1"),
    "026fb461ed55e3a2": (OF_QUERIES, "0.14.0 to 0.15.3"),
    "dd6cb3fc6671c770": (OF_QUERIES, "0.16.0 to 0.19.2"),
    "a06b6a77e066ee16": (OF_ANY, "main since e4ba3a30f2 (2026-08-17)"),
    "174202725a7a6a69": (OF_ANY, "dev since 9304a25642 (2026-07-27)"),
}
"""Fingerprints of whole modules."""
_TEXTS = {
    "fecc29b819e521f3": "84d4abd09bdeb9db",
    "2dedb6fd48911f70": "026fb461ed55e3a2",
    "e024229207a3f428": "dd6cb3fc6671c770",
    "0688c81c84722c75": "a06b6a77e066ee16",
    "c89560132a9ee837": "174202725a7a6a69",
}
"""The same by the hash of the text: to parse it takes twenty times as long."""
_REPAIRED: Repairs = {}
"""No repair was merged yet."""
_BLOCK = "BLOCK_H"


def probe(tree: SourceTree) -> Finding:
    """Return whether blocks of heads are tried that do not divide the heads."""
    source = tree.module(MODULE)
    if source is None:
        return absent(f"there is no module {MODULE}")
    body = _TEXTS.get(knowledge.as_known(source.sha256[:16])) or meaning(tree, f"{MODULE}:")
    if (known := _KNOWN.get(body)) is not None:
        shape, read_in = known
        seen = f"the mask of a block does not know which block it is, as in {read_in}"
        return broken(shape, cpp_source.at(source, "mask = x_off < head_num", seen))
    masks = [line for line in source.text.splitlines() if "mask" in line and "head_num" in line]
    if _BLOCK in source.text and any("pid_head" in line for line in masks):
        knows = cpp_source.at(source, masks[0].strip(), "a mask knows which block it is")
        return judged(tree, _REPAIRED, knows, places=(f"{MODULE}:",))
    raise unknown(source, None, f"nobody read this text of {MODULE}: {body}")
