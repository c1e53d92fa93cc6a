"""Branch on sentinels in the scatter of top-k indices into the DSA index mask.

Negative indices are sentinels. Trees of spring and June 2026 look for them with `any()` on the host, which raises while a CUDA graph
is captured: force-pushed states of PR 3674 and forks of them in `dsa`, the head of that pull request and main from 2026-06-25 to
2026-07-08 in `dsa_masking`. Since d1cab16a01 it is one `scatter_reduce_`. No release up to 0.19.2 has the branch.

The verdict rests on the function, which is replaced whole.

Source: https://github.com/NVIDIA/Megatron-LM/pull/5099
"""

from __future__ import annotations

from collections.abc import Callable

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

_VARIANT = "megatron.core.transformer.experimental_attention_variant"
DSA = Target(distribution="megatron-core", module=f"{_VARIANT}.dsa", symbol="_scatter_topk_into_index_mask")
MASKING = Target(distribution="megatron-core", module=f"{_VARIANT}.dsa_masking", symbol="scatter_topk_into_index_mask")

BRANCHY = "branch-on-sentinels"


def _probe_of(target: Target) -> Callable[[SourceTree], Finding]:
    """Return the probe of a scatter that reads from the host: that of a single-file DSA, or of one with a masking module."""
    without = {f"{target.module}:{target.symbol}": f"defines no {target.symbol}"}
    return lambda tree: forms.finding("dsa-branchless-scatter", target, tree, without)


probe_dsa, probe_masking = _probe_of(DSA), _probe_of(MASKING)
