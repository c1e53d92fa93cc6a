"""Every type of layer that Megatron's hybrid models know, for its `--spec every_layer_stack hybrid_stack_spec`.

What `local_stack` leaves out is added to it in the same way, in Megatron's local modules: gated delta nets, latent attention,
softmax attention, and layers that predict more than one token. Nothing in it is of this project.

A gated delta net has its convolution and its rule twice in Megatron: as kernels of fla, and in PyTorch, where a run is
deterministic. `hybrid_stack_spec` takes the second, in these layers alone; `with_kernels` the first. Both normalize with fla.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from local_stack import Norm
from local_stack import hybrid_stack_spec as without
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

CAUSAL = {"attn_mask_type": AttnMaskType.causal}


class DeterministicDeltaNet(GatedDeltaNet):
    """A gated delta net that is told that the run is deterministic, which no other layer is."""

    def __init__(self, config: Any, *given: Any, **named: Any) -> None:
        config = copy.copy(config)
        config.deterministic_mode = True
        super().__init__(config, *given, **named)


class LatentDotProduct(DotProductAttention):
    """Megatron's local softmax attention, which is told as Transformer Engine's is how wide keys and values are."""

    def __init__(self, *given: Any, k_channels: int = 0, v_channels: int = 0, **named: Any) -> None:
        super().__init__(*given, **named)
        if v_channels:  # latent attention lets its base class build one first, which has not heard of them
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def _mixing(attention: ModuleSpec) -> ModuleSpec:
    """Return a layer of what mixes tokens, behind its norm."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
        ),
    )


def _delta_net(module: type[GatedDeltaNet]) -> ModuleSpec:
    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=Norm, out_proj=RowParallelLinear)
    return _mixing(ModuleSpec(module=module, submodules=parts))


def _latent_attention() -> ModuleSpec:
    parts = MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_down_proj=ColumnParallelLinear,
        linear_q_up_proj=ColumnParallelLinear,
        linear_kv_down_proj=ColumnParallelLinear,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=LatentDotProduct,
        linear_proj=RowParallelLinear,
        q_layernorm=IdentityOp,
        kv_layernorm=IdentityOp,
    )
    return _mixing(ModuleSpec(module=MLASelfAttention, params=CAUSAL, submodules=parts))


def _attention() -> ModuleSpec:
    parts = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
    )
    return _mixing(ModuleSpec(module=SelfAttention, params=CAUSAL, submodules=parts))


def _further_tokens() -> ModuleSpec:
    """Return the norms and the projection before the layers of the pattern, which Megatron builds itself."""
    parts = MultiTokenPredictionLayerSubmodules(
        enorm=Norm, hnorm=Norm, eh_proj=ColumnParallelLinear, mtp_model_layer=None, layer_norm=Norm
    )
    layer = ModuleSpec(module=MultiTokenPredictionLayer, submodules=parts)
    return ModuleSpec(
        module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
    )


def _stack(delta_net: type[GatedDeltaNet]) -> ModuleSpec:
    layers = replace(
        without.submodules,
        gdn_layer=_delta_net(delta_net),
        mla_layer=_latent_attention(),
        attention_layer=_attention(),
        mtp_block_spec=_further_tokens(),
    )
    return ModuleSpec(module=without.module, submodules=layers)


hybrid_stack_spec = _stack(DeterministicDeltaNet)
with_kernels = _stack(GatedDeltaNet)
