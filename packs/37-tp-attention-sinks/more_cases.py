"""Multi-latent attention with learnable sinks on two tensor parallel ranks: are the sinks of both in the norm that gradients are clipped by?

A real `MLASelfAttention` has a real `DotProductAttention` for its core, which takes the arguments that multi-latent attention has for the
core of Transformer Engine and leaves those out that it has no use for. An optimizer has the sinks alone: in the norm of all weights down
projections count as well, which are the defect of pack 25.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent, beside, cpu_for_gpu, on_ranks

PACK = beside(__file__)
MODULE = "megatron.core.transformer.multi_latent_attention"
LAYERS = "megatron.core.post_training.modelopt.layers"
PLAIN, ROTARY, RANK = 2, 2, 6


def _latent() -> Behaviour:
    PACK._module()
    module = _module()
    found = on_ranks(PACK.RANKS, lambda _: _clipped(module))
    apart, seen = PACK._said(
        [
            {name: found[f"rank {rank}, {name}"][0] for name in ("norm", "on one rank", "apart")}
            for rank in range(PACK.RANKS)
        ]
    )
    return Behaviour(broken=apart > PACK.TOLERANCE, seen=f"of sinks of a latent attention, {seen}")


def _clipped(module: Any) -> Mapping[str, Any]:
    """Return the norm of the gradients of sinks on one rank and on all, and how far clipped gradients are apart."""
    from megatron.core import parallel_state

    PACK._build = _build
    with cpu_for_gpu():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
        whole, right = PACK._clipped(module, 1, PACK.SINKS)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=PACK.RANKS)
        norm, gradients = PACK._clipped(module, PACK.RANKS, PACK.SINKS)
    apart = max(PACK._apart(each, PACK._share(name, right[name], PACK.RANKS)) for name, each in gradients.items())
    return {"norm": norm, "on one rank": whole, "apart": apart}


def _build(module: Any, ranks: int) -> Any:
    """Return an attention that has its share of the same weights, whatever the number of ranks."""
    import torch
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=PACK.HIDDEN,
        num_attention_heads=PACK.HEADS,
        kv_channels=PLAIN + ROTARY,
        q_lora_rank=RANK,
        kv_lora_rank=RANK,
        qk_head_dim=PLAIN,
        qk_pos_emb_head_dim=ROTARY,
        v_head_dim=PLAIN + ROTARY,
        rope_type="rope",
        apply_rope_fusion=False,
        softmax_type="learnable",
        attention_dropout=0.0,
        add_bias_linear=False,
        masked_softmax_fusion=False,
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,
        **({"transformer_impl": "local"} if hasattr(MLATransformerConfig, "transformer_impl") else {}),
    )
    parts = module.MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_down_proj=module.Linear,
        linear_q_up_proj=ColumnParallelLinear,
        linear_kv_down_proj=module.Linear,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=ModuleSpec(module=_core()),
        linear_proj=RowParallelLinear,
        q_layernorm=IdentityOp,
        kv_layernorm=IdentityOp,
    )
    attention = module.MLASelfAttention(config, parts, layer_number=1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, each in sorted(attention.named_parameters()):
            axis, shares = PACK._axis(name), 1 if "down" in name else ranks
            shape = [size * (shares if number == axis else 1) for number, size in enumerate(each.shape)]
            whole = torch.randn(*shape, generator=generator) * 0.3
            each.copy_(whole.chunk(shares, axis)[torch.distributed.get_rank() % shares])
    return attention


def _core() -> Any:
    base: Any = importlib.import_module(PACK.CORE).DotProductAttention

    class Core(base):  # type: ignore[misc]
        def __init__(self, **given: Any) -> None:
            of_engine = {"k_channels", "v_channels", "cp_comm_type"}
            super().__init__(**{name: value for name, value in given.items() if name not in of_engine})

        def forward(self, query: Any, key: Any, value: Any, mask: Any, **given: Any) -> Any:
            return super().forward(query, key, value, mask, attn_mask_type=given.get("attn_mask_type"))

    return Core


def _module() -> Any:
    """Return the module of the attention, which can be made without Transformer Engine.

    Raises:
        TargetAbsent: there is none.
    """
    try:
        module: Any = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if not MODULE.startswith(str(error.name)):
            raise
        raise TargetAbsent(f"there is no {MODULE}") from error
    if not isinstance(getattr(module, "TELinear", None), type):
        module.Linear = importlib.import_module(LAYERS).Linear
        module.HAVE_TE = False  # 0.16.1 says that it has Transformer Engine's layers, and has mocks
    return module


CASES = (
    Case(
        name="norm-latent-cpu",
        overlay="tp-attention-sinks",
        device="cpu",
        versions=("torch",),
        run=_latent,
        targets=(MODULE,),
    ),
)
