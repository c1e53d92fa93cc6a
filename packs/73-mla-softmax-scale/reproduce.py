"""Megatron's multi-latent attention with `softmax_scale`: does it scale its logits by that?

Real attentions with a real `DotProductAttention` run forwards and backwards, and once more after their core was told the configured scale. Compared are outputs and gradients of all weights. Ranks are forked and meet with gloo.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent, on_ranks

OVERLAY = "mla-softmax-scale"
LATENT = "megatron.core.transformer.multi_latent_attention"
ABSORBED = "megatron.core.transformer.experimental_attention_variant.absorbed_mla"
HIDDEN, HEADS, PLAIN, ROTARY, VALUE, TOKENS = 32, 2, 24, 8, 16, 8
"""Channels, heads, those of keys of a head that do not turn and that do, those of values of a head and of both latents, and length."""
FACTOR = 40.0
SCALE = 1 / 16
TOLERANCE = 1e-5
"""Relative, in Frobenius norms: float32."""


def _run(kinds: tuple[str, ...] = ("MLASelfAttention",), **asked: Any) -> Behaviour:
    seen, broken = [], False
    for kind in kinds:
        if kind in kinds[1:] and not exists(kind):
            continue
        found = attended(kind, softmax_scale=SCALE, **asked)
        core, own, right, output, gradients = (found[f"rank 0, {name}"][0] for name in ("core", "own", "right", "output", "gradients"))
        broken |= max(output, gradients, abs(core / right - 1), abs(own / right - 1)) > TOLERANCE
        seen.append(f"{kind} scales logits by {core:.4f}, in inference by {own:.4f}, for {right:.4f}: its output is {output:.1e} off, gradients {gradients:.1e}")
    return Behaviour(broken=broken, seen="; ".join(seen))


def attended(kind: str = "MLASelfAttention", ranks: int = 1, **settings: Any) -> Mapping[str, list[float]]:
    """Return of each rank the scales of a core and its attention, the right one, and how far results are apart with that; and results.

    Args:
        kind: of attention.
        ranks: under tensor parallelism.
        settings: of the configuration.

    Raises:
        TargetAbsent: there is no such attention, or attention has no such setting.
    """
    prepare(kind)
    return on_ranks(ranks, lambda _: _attended(kind, settings))


def prepare(kind: str) -> Any:
    """Import what ranks need before they are forked, and return the module of a class of attention."""
    try:
        module: Any = importlib.import_module(ABSORBED if kind.startswith("Absorbed") else LATENT)
    except ModuleNotFoundError as error:
        raise TargetAbsent(f"there is no {error.name}") from error
    if not hasattr(importlib.import_module("megatron.core.transformer.transformer_config").MLATransformerConfig, "softmax_scale"):
        raise TargetAbsent("attention has no such setting")
    importlib.import_module("megatron.core.transformer.dot_product_attention")
    if not isinstance(getattr(module, "TELinear", None), type):
        module.HAVE_TE = False  # 0.16 says that it has Transformer Engine's layers, and has mocks
    return module


def exists(kind: str) -> bool:
    """Return whether a release has a class of attention."""
    try:
        return hasattr(prepare(kind), kind)
    except TargetAbsent:
        return False


def _attended(kind: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    import torch

    start()
    attention = build(kind, **settings)
    config, core = attention.config, attention.core_attention
    yarn = 0.1 * config.mscale * math.log(FACTOR) + 1
    head = (PLAIN + ROTARY) ** -0.5 if config.softmax_scale is None else config.softmax_scale
    results = _results(attention)
    found = {"core": core.softmax_scale, "own": attention.softmax_scale, "right": yarn * yarn * head, "results": torch.cat(results)}
    core.softmax_scale = found["right"]
    apart = [float((one - other).norm() / other.norm()) for one, other in zip(results, _results(attention), strict=True)]
    return {**found, "output": apart[0], "gradients": apart[1]}


def start() -> None:
    """Make one tensor parallel group of all ranks, on CPUs."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.cuda.current_device = lambda: "cpu"
    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(torch.distributed.get_world_size())


def _results(attention: Any) -> tuple[Any, Any]:
    """Return the output of an attention, and the gradients of all its weights."""
    import torch

    generator = torch.Generator().manual_seed(2)
    shape = (TOKENS, 1, HIDDEN)
    hidden, weights = (torch.randn(shape, generator=generator) for _ in range(2))
    output, _ = attention(hidden, torch.ones(1, 1, TOKENS, TOKENS).triu(1).bool())
    gradients = torch.autograd.grad((output * weights).sum(), [*attention.parameters()])
    return output.detach().flatten(), torch.cat([each.flatten() for each in gradients])


def build(kind: str, **settings: Any) -> Any:
    """Return an attention with weights from one seed."""
    import torch
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    module = prepare(kind)
    sizes = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "kv_channels": VALUE, "q_lora_rank": VALUE, "kv_lora_rank": VALUE}
    heads = {"qk_head_dim": PLAIN, "qk_pos_emb_head_dim": ROTARY, "v_head_dim": VALUE, "rope_type": "rope"}
    yarn = {"rotary_scaling_factor": FACTOR, "mscale": 0.0, "mscale_all_dim": settings.get("mscale", 0.0)}
    options: dict[str, Any] = {"attention_dropout": 0.0, "add_bias_linear": False, "masked_softmax_fusion": False, "use_cpu_initialization": True}
    if hasattr(MLATransformerConfig, "transformer_impl"):
        options["transformer_impl"] = "local"
    config = MLATransformerConfig(**{**sizes, **heads, **yarn, **options, "tensor_model_parallel_size": torch.distributed.get_world_size(), **settings})
    submodules = getattr(module, f"{kind.removeprefix('Fused')}Submodules")
    linear = [each for each in submodules.__dataclass_fields__ if each.startswith("linear_") and each != "linear_proj"]
    if "linear_k_up_proj" in linear and "linear_kv_up_proj" in linear:  # the absorbed one on dev takes either
        linear.remove("linear_kv_up_proj")
    norms = dict.fromkeys(("q_layernorm", "kv_layernorm"), IdentityOp)
    parts = submodules(**dict.fromkeys(linear, ColumnParallelLinear), **norms, core_attention=ModuleSpec(module=core_of()), linear_proj=RowParallelLinear)
    torch.manual_seed(73)
    attention = getattr(module, kind)(config, parts, layer_number=1)
    for each in attention.parameters():
        torch.nn.init.normal_(each, std=0.3)
    return attention


def core_of() -> Any:
    """Return the class of a core: `DotProductAttention`, without what multi-latent attention passes for the core of Transformer Engine."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Core(DotProductAttention):  # type: ignore[misc]
        def __init__(self, **given: Any) -> None:
            super().__init__(**{name: value for name, value in given.items() if name not in {"k_channels", "v_channels", "cp_comm_type", "is_mtp_layer"}})

        def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
            if value is None:  # of the absorbed attention, whose keys are those of one head, and its values a part of them
                key = key.expand(-1, -1, query.size(2), -1)
                value = key[..., :VALUE]
            mask = query.new_ones(1, 1, TOKENS, TOKENS).triu(1).bool()
            return super().forward(query, key, value, mask)

    return Core


_case = functools.partial(Case, overlay=OVERLAY, device="cpu", versions=("torch",))
CASES = (
    _case(name="latent-attention-cpu", run=functools.partial(_run, ("MLASelfAttention", "FusedMLASelfAttention", "AbsorbedMLASelfAttention"))),
    _case(name="yarn-cpu", run=functools.partial(_run, mscale=1.0, rope_type="yarn")),
    _case(name="tensor-parallel-cpu", run=functools.partial(_run, ranks=2)),
)
