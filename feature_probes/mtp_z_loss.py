"""Probe for a z-loss of a repeated prediction layer that is divided by the number of predictions after it is attached.

`TopKRouter.apply_z_loss` attaches the loss to the logits, and divides it afterwards: the logged value is divided, gradients are not.

The verdict rests on that method, the function that computes the loss and the class that attaches it.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6748
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

ROUTER = "TopKRouter"
METHOD = f"{ROUTER}.apply_z_loss"
TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.moe.router", symbol=METHOD)
AFTERWARDS = "divided-afterwards"

_ABSENT_WITHOUT = {
    f"{TARGET.module}:{METHOD}": f"defines no {METHOD}",
    f"{TARGET.module}#mtp_use_repeated_layer": "no layer is used for more than one prediction",
}


def probe(tree: SourceTree) -> Finding:
    """Return whether gradients of a repeated layer's z-loss count once for each prediction."""
    return forms.finding("mtp-z-loss", TARGET, tree, _ABSENT_WITHOUT)
