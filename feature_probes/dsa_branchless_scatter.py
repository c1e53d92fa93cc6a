"""Branch on sentinels in the scatter of top-k indices into the DSA index mask.

Negative indices are sentinels. Trees of spring and June 2026 look for them with `any()` on the host, which raises while a CUDA graph
is captured: force-pushed states of PR 3674 and forks of them in `dsa`, the head of that pull request and main from 2026-06-25 to
2026-07-08 in `dsa_masking`. Since d1cab16a01 it is one `scatter_reduce_`. No release up to 0.19.2 has the branch.

The verdict rests on the function, which is replaced whole.

Source: https://github.com/NVIDIA/Megatron-LM/pull/5099
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

_ID = "dsa-branchless-scatter"
_VARIANT = "megatron.core.transformer.experimental_attention_variant"
DSA = Target(distribution="megatron-core", module=f"{_VARIANT}.dsa", symbol="_scatter_topk_into_index_mask")
MASKING = Target(distribution="megatron-core", module=f"{_VARIANT}.dsa_masking", symbol="scatter_topk_into_index_mask")

BRANCHY = "branch-on-sentinels"


def probe_dsa(tree: SourceTree) -> Finding:
    """Return whether the scatter of a single-file DSA reads from the host."""
    return _probe(DSA, tree)


def probe_masking(tree: SourceTree) -> Finding:
    """Return whether the scatter of a DSA with a masking module reads from the host."""
    return _probe(MASKING, tree)


def _probe(target: Target, tree: SourceTree) -> Finding:
    return forms.finding(_ID, target, tree, {f"{target.module}:{target.symbol}": f"defines no {target.symbol}"})
