"""Probe the gradient of Megatron's balancing loss over the global batch, which is divided by the number of data parallel ranks twice.

The loss of a rank is its share: its own probabilities over the tokens of all data parallel ranks. Gradients of data parallel ranks are averaged. The seam
relies on scores that are used by that loss alone, so verdicts rest on the router's method, on the code that attaches the loss, on coefficients, and on the loss.

Source: https://github.com/NVIDIA/Megatron-LM/issues/3672
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

ROUTER = "TopKRouter"
METHOD = f"{ROUTER}._apply_global_aux_loss"
TARGET = Target("megatron-core", "megatron.core.transformer.moe.router", METHOD)
UTILS = "megatron.core.transformer.moe.moe_utils"
DIVIDED = "divided-twice"
_NEEDED = {
    f"{TARGET.module}:{ROUTER}": f"there is no {TARGET.module}.{ROUTER}",
    f"{TARGET.module}:{METHOD}": f"{ROUTER} has no loss over the global batch",
}


def probe(tree: SourceTree) -> Finding:
    """Return whether gradients of the loss over the global batch are a share of a share."""
    return forms.finding("global-aux-loss-scale", TARGET, tree, _NEEDED)
