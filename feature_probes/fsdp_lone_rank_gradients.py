"""Probe the gradient buffers of Megatron-FSDP, which are not sharded where one rank reduces by itself, and are reduced in each microbatch all the same.

Where parameters or gradients are sharded, gradients of a microbatch are reduced separately and added to the sum of earlier ones. Where the group has one rank, both are the same memory:
in 0.16 the sum is added to itself, and since 0.17.0 it is scaled once more, or, where gradients are sent in another dtype, added to itself. Up to 0.15.3 it is reduced as other buffers are. The verdict rests on the code that makes buffers, on the functions that reduce them and scale gradients, and on the hooks that pass gradients on.

Source: https://github.com/NVIDIA/Megatron-LM/issues/6660
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

CLASS, METHOD, SCALE = "ParamAndGradBuffer", "_init_each_parameter_group_buffers", "gradient_reduce_preprocessing"
TARGET = Target(
    "megatron-core", "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer", f"{CLASS}.{METHOD}"
)
IN_PLACE = "reduced-in-place"


def probe(tree: SourceTree) -> Finding:
    """Return whether the gradients that one rank reduces are kept where they are reduced."""
    return forms.finding("fsdp-lone-rank-gradients", TARGET, tree)
