"""Megatron's QK clipping of real attentions: is each head scaled by its own largest logit, and left alone below the threshold?

`megatron.core.optimizer.qk_clip.clip_qk` asks one gloo rank's layers to clip. Largest logits are given, as Transformer Engine's attention keeps them.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent, on_ranks

ATTENTION = "megatron.core.transformer.attention"
LATENT = "megatron.core.transformer.multi_latent_attention"
CLIP = "megatron.core.optimizer.qk_clip"
LINEAR = "megatron.core.tensor_parallel.layers"
HIDDEN, HEADS, GROUPS, PLAIN, ROTARY, THRESHOLD, ALPHA = 16, 4, 2, 6, 4, 100.0, 0.25
MIXED = (-3.0, -40.0, 400.0, 150.0)
"""Largest logits of heads, of which the first two are one group of queries."""
TOLERANCE = 1e-6
"""Of the largest weight: float32."""
_CHANNELS, _QUERIES = HIDDEN // HEADS, HEADS // GROUPS
EXPONENTS = {
    "linear_qkv": [ALPHA] * _CHANNELS * _QUERIES + [1 - ALPHA] * _CHANNELS + [0] * _CHANNELS,
    "linear_q_proj": [ALPHA] * PLAIN + [1] * ROTARY,
    "linear_kv_up_proj": [1 - ALPHA] * PLAIN + [0] * PLAIN,
}
"""By weight, to what power of its factor each row of a head, or of a group of heads, is scaled."""


def clipped(module: str, logits: Sequence[float], *, alone: bool = False, **settings: Any) -> Mapping[str, Sequence[float]]:
    """Return weights of an attention that was clipped, and what they should be, by weight; and the logit that is logged.

    Args:
        module: of the attention.
        logits: the largest of each head.
        alone: whether nothing is clipped and a logit is logged alone.
        settings: of the configuration.
    """
    try:
        for name in (CLIP, ATTENTION, LATENT, LINEAR):
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise TargetAbsent(f"there is no {error.name}") from error
    found = on_ranks(1, lambda _: _clipped(module, logits, alone=alone, **settings))
    return {name.removeprefix("rank 0, "): each for name, each in found.items()}


def _clipped(module: str, logits: Sequence[float], *, alone: bool, **settings: Any) -> dict[str, Any]:
    import torch
    from megatron.core import parallel_state

    torch.cuda.current_device = lambda: torch.device("cpu")  # 0.19.2 makes a table of angles there
    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    attention = _grouped(**settings) if module == ATTENTION else _latent(**settings)
    largest = torch.tensor(logits)
    attention.core_attention.current_max_attn_logits = largest
    weights = {name: getattr(attention, name).weight for name in EXPONENTS if hasattr(attention, name)}
    right, masters = {}, {}
    for name, weight in weights.items():
        heads = largest.view(GROUPS, -1).amax(1) if name == "linear_qkv" else largest
        factors = THRESHOLD / heads.double().clamp(min=THRESHOLD)
        rows = factors[:, None] ** torch.tensor(EXPONENTS[name])
        right[f"right, {name}"] = weight.detach() * rows.view(-1, 1)
        masters[f"master of {name}"] = weight.main_param = weight.detach().clone()
    layers = [SimpleNamespace(self_attention=attention)]
    chunk = SimpleNamespace(module=SimpleNamespace(module=SimpleNamespace(decoder=SimpleNamespace(layers=layers))))
    logged: float = importlib.import_module(CLIP).clip_qk([chunk], alone)
    return {**right, **weights, **masters, "logged": logged}


def _behaviour(module: str, logits: Sequence[float]) -> Behaviour:
    seen, broken = [], False
    found = clipped(module, logits)
    for name in EXPONENTS.keys() & found.keys():
        apart = [abs(one - other) for one, other in zip(found[name], found[f"right, {name}"], strict=True)]
        numbers = [each for each in apart if not math.isnan(each)]
        largest = max(map(abs, found[f"right, {name}"]))
        broken |= len(numbers) < len(apart) or max(numbers) > TOLERANCE * largest
        seen.append(f"{name}: {len(apart) - len(numbers)} of {len(apart)} weights are no numbers, others {max(numbers) / largest:.1e} off")
    return Behaviour(broken=broken, seen=f"largest logits {logits}, threshold {THRESHOLD}: {'; '.join(sorted(seen))}")


def _settings(**settings: Any) -> dict[str, Any]:
    clip = {"qk_clip": True, "qk_clip_threshold": THRESHOLD, "qk_clip_alpha": ALPHA}
    model = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "add_bias_linear": False}
    return {**clip, **model, "use_cpu_initialization": True, "perform_initialization": True, **settings}


def _core() -> Any:
    """Return the class of a core that keeps largest logits; it is given some, and never runs."""
    import torch

    class Core(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

    return Core


def _grouped(**settings: Any) -> Any:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    module: Any = importlib.import_module(ATTENTION)
    parts = module.SelfAttentionSubmodules(ColumnParallelLinear, _core(), RowParallelLinear)
    config = TransformerConfig(**_settings(num_query_groups=GROUPS, **settings))
    return module.SelfAttention(config, parts, layer_number=1, attn_mask_type=AttnMaskType.causal)


def _latent(**settings: Any) -> Any:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    module: Any = importlib.import_module(LATENT)
    latent = {"q_lora_rank": None, "kv_lora_rank": 8, "v_head_dim": PLAIN, "rope_type": "rope", "apply_rope_fusion": False}
    if not isinstance(getattr(module, "TELinear", None), type):
        module.HAVE_TE = False  # 0.16 says that it has Transformer Engine's layers, and has mocks
    heads = {"qk_head_dim": PLAIN, "qk_pos_emb_head_dim": ROTARY, "transformer_impl": "local"}
    config = MLATransformerConfig(**_settings(**latent, **heads, **settings))
    linear = ("linear_q_proj", "linear_kv_down_proj", "linear_kv_up_proj")
    parts = module.MLASelfAttentionSubmodules(
        **dict.fromkeys(linear, ColumnParallelLinear),
        core_attention=_core(),
        linear_proj=RowParallelLinear,
        q_layernorm=IdentityOp,
        kv_layernorm=IdentityOp,
    )
    return module.MLASelfAttention(config, parts, layer_number=1)


_case = functools.partial(Case, overlay="qk-clip-negative-head", device="cpu", versions=("torch",))
CASES = (
    _case(name="grouped-queries-cpu", run=functools.partial(_behaviour, ATTENTION, MIXED), targets=(ATTENTION,)),
    _case(name="latent-attention-cpu", run=functools.partial(_behaviour, LATENT, MIXED), targets=(LATENT,)),
)
