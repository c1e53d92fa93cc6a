"""Multi-latent attention without `softmax_scale`, and grouped attention with it: the same bits with the overlay and without."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside, on_ranks

PACK = beside(__file__)


def _grouped(**settings: Any) -> Mapping[str, list[float]]:
    PACK.prepare("MLASelfAttention")
    return on_ranks(1, lambda _: _attended(settings))


def _attended(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    import torch
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    PACK.start()
    sizes = {"num_layers": 1, "hidden_size": PACK.HIDDEN, "num_attention_heads": PACK.HEADS, "attention_dropout": 0.0}
    config = TransformerConfig(
        **sizes, add_bias_linear=False, masked_softmax_fusion=False, use_cpu_initialization=True, **settings
    )
    parts = SelfAttentionSubmodules(ColumnParallelLinear, PACK.core_of(), RowParallelLinear)
    torch.manual_seed(73)
    attention = SelfAttention(config, parts, layer_number=1, attn_mask_type=AttnMaskType.causal)
    hidden = torch.randn(PACK.TOKENS, 1, PACK.HIDDEN)
    return {"scale": attention.core_attention.softmax_scale, "output": attention(hidden, None)[0]}


_of = functools.partial(Neighbour, overlay=PACK.OVERLAY)
NEIGHBOURS = (
    _of(name="no-scale", run=PACK.attended),
    _of(name="no-scale-yarn", run=functools.partial(PACK.attended, mscale=1.0, rope_type="yarn")),
    _of(name="no-scale-absorbed", run=functools.partial(PACK.attended, "AbsorbedMLASelfAttention")),
    _of(name="grouped-attention", run=functools.partial(_grouped, softmax_scale=PACK.SCALE)),
    _of(name="grouped-attention-no-scale", run=_grouped),
)
