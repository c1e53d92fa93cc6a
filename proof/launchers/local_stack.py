"""Layers of a hybrid model without Transformer Engine, for Megatron's `--spec local_stack hybrid_stack_spec`.

Megatron's own stack asks for Transformer Engine in every layer. This one has Megatron's local modules in their places, and
its norms before what they are fused with there: Mamba-2, absorbed MLA with DeepSeek sparse attention, MLP and MoE.
Nothing in it is of this project.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import absorbed_mla, dsa
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)


class Norm:
    """PyTorch's norm, whose gradients Megatron sums under sequence parallelism. Megatron's local one refuses that."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        """Return the module; Megatron builds what is a class, and takes a function as it is."""
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        made = kind(hidden_size, eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        for weight in made.parameters():
            weight.sequence_parallel = config.sequence_parallel
        return made


class Linear(torch.nn.Linear):
    """A linear layer that every tensor-parallel rank has whole, called as Transformer Engine's is.

    Raises:
        ValueError: when built with a bias, which no layer of this stack asks for.
    """

    def __init__(
        self, inputs: int, outputs: int, *, config: Any, init_method: Callable[..., Any], bias: bool, **_: Any
    ) -> None:
        if bias:
            raise ValueError("local_stack.Linear has no bias: build it with bias=False, or take Transformer Engine's")
        super().__init__(inputs, outputs, bias=False, device=torch.cuda.current_device(), dtype=config.params_dtype)
        if config.perform_initialization:
            init_method(self.weight)

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return (..., outputs), and no bias, for (..., inputs)."""
        return super().forward(given), None


def _mamba() -> ModuleSpec:
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=Norm,
            mixer=ModuleSpec(module=MambaMixer, submodules=mixer),
            mamba_bda=get_bias_dropout_add,
        ),
    )


def _sparse_attention() -> ModuleSpec:
    indexer = dsa.DSAIndexerSubmodules(linear_wq_b=Linear, linear_wk=Linear, k_norm=Norm, linear_weights_proj=Linear)
    core = dsa.DSAttentionSubmodules(indexer=ModuleSpec(module=dsa.DSAIndexer, submodules=indexer))
    parts = absorbed_mla.AbsorbedMLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_down_proj=ColumnParallelLinear,
        linear_q_up_proj=ColumnParallelLinear,
        linear_kv_down_proj=ColumnParallelLinear,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=ModuleSpec(module=dsa.DSAttention, submodules=core),
        linear_proj=RowParallelLinear,
        q_layernorm=IdentityOp,
        kv_layernorm=IdentityOp,
    )
    causal = {"attn_mask_type": AttnMaskType.causal}
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=ModuleSpec(module=absorbed_mla.AbsorbedMLASelfAttention, params=causal, submodules=parts),
            self_attn_bda=get_bias_dropout_add,
        ),
    )


def _mlp() -> ModuleSpec:
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=Norm,
            mlp=partial(MLP.as_mlp_submodule, submodules=parts),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _experts() -> ModuleSpec:
    return ModuleSpec(
        module=MoETransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=Norm,
            mlp=get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False),
            mlp_bda=get_bias_dropout_add,
        ),
    )


hybrid_block.TENorm = Norm
"""The norm after the last layer; the block names Transformer Engine's."""
hybrid_stack_spec = ModuleSpec(
    module=hybrid_block.HybridStack,
    submodules=hybrid_block.HybridStackSubmodules(
        mamba_layer=_mamba(),
        dsa_layer=_sparse_attention(),
        mlp_layer=_mlp(),
        moe_layer=_experts(),
    ),
)
