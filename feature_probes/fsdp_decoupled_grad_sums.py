"""Probe whether gradients that Megatron-FSDP keeps for a precision-aware optimizer are found where gradients of replicas are summed over ranks.

With `megatron_fsdp_use_decoupled_grad` they are `decoupled_grad` of parameters. `finalize_model_grads` looks for `main_grad` and `grad`, finds None, and leaves the parameter out.
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TARGET = Target("megatron-core", "megatron.core.distributed.finalize_model_grads", "_get_main_grad_attr")
BUFFERS = "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer"
OVERLOOKED = "overlooked"
_NEEDED = {
    f"{BUFFERS}:": "there is no Megatron-FSDP",
    f"{BUFFERS}#megatron_fsdp_use_decoupled_grad": "Megatron-FSDP keeps no gradients for a precision-aware optimizer",
}


def probe(tree: SourceTree) -> Finding:
    """Return whether such gradients are overlooked."""
    return forms.finding("fsdp-decoupled-grad-sums", TARGET, tree, _NEEDED)
