"""Probe whether Liger's fused linear cross entropy scales gradients by the gradient of the loss as if their rows were contiguous.

Source: `element_mul_kernel` of liger-kernel, which has a column stride since 0.8.5.
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

MODULE = "liger_kernel.ops.fused_linear_cross_entropy"
TARGET = Target("liger-kernel", MODULE, "fused_linear_cross_entropy_backward")
CONTIGUOUS_ROWS = "contiguous-rows"


def probe(tree: SourceTree) -> Finding:
    """Return whether gradients of transposed weights or hidden states, whose rows are not contiguous, are scaled in the wrong places."""
    return forms.finding("liger-flce-strided-gradients", TARGET, tree)
