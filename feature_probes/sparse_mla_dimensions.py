"""Guards in the TileLang backend of DSA that decline other dimensions than those of its one kernel.

`fused_sparse_mla_absorbed` returns None, and its caller builds all scores, unless the query has 576 channels and the value
512, the number of heads is a power of two once it is 16 or more, indices come in blocks of 64, and everything is bfloat16.
Up to 0.18.2 there is no TileLang backend, and dev names one that is not in the tree. June 2026 (PR 5049) had one kernel call for each
batch element and other guards, which no record has. 0.19.0 to 0.19.2 and main have the guards. No repair has been seen.

The seam is on `run_fused_absorbed_sparse_attention`, through which the backend calls the dispatcher, because
`fp8-quantized-unwrap` (pack 03) replaces the dispatcher itself. It calls the dispatcher first and relies on None for a call
that it declines. The verdict rests on both, and on the guards and the kernel that the dispatcher names.

Source: https://github.com/NVIDIA/Megatron-LM/pull/5049
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

FUNCTION = "run_fused_absorbed_sparse_attention"
DISPATCHER = "fused_sparse_mla_absorbed"
TARGET = Target("megatron-core", "megatron.core.transformer.experimental_attention_variant.ops.tilelang_dsa", FUNCTION)
ONE_KERNEL = "one-kernel"


def probe(tree: SourceTree) -> Finding:
    """Return whether the dispatcher declines other channels, heads and numbers of indices."""
    return forms.finding("sparse-mla-dimensions", TARGET, tree)
