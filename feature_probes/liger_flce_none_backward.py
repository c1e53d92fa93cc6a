"""The fused linear cross entropy of liger-kernel, and the upstream gradient by which it scales that of each token.

With `reduction="none"` the backward pass receives one gradient per token. Until 0.8.1 it hands the tensor to a
kernel that reads only its first element, and multiplies every gradient by that. From 0.8.2 on the gradients are
computed in the backward pass, with `token_grad_output`.

The verdict rests on the whole module and the whole module of its kernel, which the seam differentiates; a repair also on the callers of
the kernel since 0.8.3.
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

MODULE = "liger_kernel.ops.fused_linear_cross_entropy"
FUNCTION = "LigerFusedLinearCrossEntropyFunction"
TARGET = Target(distribution="liger-kernel", module=MODULE, symbol=FUNCTION)
CORE_FORWARD = "fused_linear_cross_entropy_forward"

DETACHED = "per-token-scalar-backward"
"""The forward pass works on an input without gradient, and then computes none (or no more than the input's)."""
BIAS_NEEDS_GRADIENT = "per-token-scalar-backward-input-grad-with-bias"
"""The forward pass fails when there is a bias and the input has no gradient."""
INPUT_NEEDS_GRADIENT = "per-token-scalar-backward-input-grad"
"""The forward pass fails when the input has no gradient."""
SCALAR_NONE = "scalar-none"
"""`reduction="none"` returns one number."""

_ABSENT_WITHOUT = {
    f"{MODULE}:{FUNCTION}": f"defines no {FUNCTION}",
    f"{MODULE}#reduction=": "there is no choice of reduction",
}


def probe(tree: SourceTree) -> Finding:
    """Return whether per-token gradients are right in the liger-kernel of a tree."""
    return forms.finding("liger-flce-none-backward", TARGET, tree, _ABSENT_WITHOUT)
