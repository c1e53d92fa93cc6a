"""Muon and matrices that Megatron keeps in one parameter: is each orthogonalized by itself?

A real model of one layer gets gradients, and the real Muon of `get_megatron_optimizer` takes a step. Steps of a gated MLP's first layer, which holds the weights of a gate and those of its values, and of the projection that gives
keys and values in multi-latent attention, are compared with those of the two matrices, by the same Newton-Schulz iteration. Ranks are forked and meet with gloo.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent, cpu_for_gpu, on_ranks

OVERLAY = "muon-gated-fc1"
MODULE = "megatron.core.optimizer.emerging_optimizers"
HIDDEN, WIDTH, HEADS, RATE, STEPS = 16, 24, 2, 0.5, 5
LATENT, KEYS, VALUES = 12, 8, 4
"""Channels of multi-latent attention: of its latent, and of keys without those that turn and of values in a head."""
TOLERANCE = 1e-4
"""Relative, of a step in float32 in Frobenius norms."""


def _run(**asked: Any) -> Behaviour:
    import torch

    found = stepped(**asked)
    apart = {}
    for name in found:
        if name.startswith("rank 0, right of "):
            layer = name.removeprefix("rank 0, right of ")
            step, right = (torch.tensor(found[f"rank 0, {which}{layer}"]) for which in ("", "right of "))
            apart[layer] = float((step - right).norm() / right.norm())
    told = ", ".join(f"{layer} {each:.1e}" for layer, each in apart.items())
    return Behaviour(broken=any(each > TOLERANCE for each in apart.values()), seen=f"steps are off by {told}")


def stepped(ranks: int = 1, **asked: Any) -> Mapping[str, list[float]]:
    """Return of each rank the step of each matrix, and `right of` those that hold two.

    Args:
        ranks: under tensor parallelism.
        asked: see `_stepped`.

    Raises:
        TargetAbsent: there is no Muon with splits of each parameter.
        Blocked: the package that has Newton-Schulz iterations is not installed.
    """
    prepare()
    return on_ranks(ranks, functools.partial(_stepped, asked))


def prepare() -> None:
    """Import what ranks need before they are forked."""
    try:
        module: Any = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        raise TargetAbsent(f"there is no {MODULE}") from error
    if not module.HAVE_EMERGING_OPTIMIZERS:
        raise Blocked("the package emerging-optimizers is not installed")
    for name in ("models.gpt.gpt_layer_specs", "models.gpt", "transformer.transformer_config", "tensor_parallel.layers"):
        importlib.import_module(f"megatron.core.{name}")


def _stepped(asked: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    """Take one step of a model.

    Args:
        asked: `gated`, whether the MLP is (yes); `latent`, whether attention is multi-latent; `experts`, how many there are in place of an MLP; `masters`, whether weights are bfloat16 and the optimizer keeps float32;
            `trained`, a part of the names of parameters that want a gradient; and any setting of `OptimizerConfig`.
        rank: of tensor parallelism.
    """
    import torch
    from megatron.core import optimizer, parallel_state

    asked = {"masters": False, "trained": "", **asked}
    masters, trained = asked.pop("masters"), asked.pop("trained")
    model_asked = {name: asked.pop(name) for name in ("gated", "latent", "experts") if name in asked}
    torch.cuda.current_device = lambda: "cpu"
    parallel_state.initialize_model_parallel(torch.distributed.get_world_size())
    settings: dict[str, Any] = {
        "optimizer": "muon", "lr": RATE, "clip_grad": 0.0, "weight_decay": 0.0, "muon_momentum": 0.0, "muon_fp32_matmul_prec": "highest",
        "muon_num_ns_steps": STEPS, "bf16": masters, **asked,
    }  # fmt: skip
    with cpu_for_gpu():
        model = _model(**model_asked)
        if masters:
            model.bfloat16()
        for name, each in model.named_parameters():
            each.requires_grad_(trained in name)
        made = optimizer.get_megatron_optimizer(optimizer.OptimizerConfig(**settings), [model])
        generator = torch.Generator().manual_seed(rank)
        weights = {name: each for name, each in model.named_parameters() if each.requires_grad and each.ndim == 2}
        for each in model.parameters():
            each.main_grad = torch.randn(each.shape, generator=generator) * torch.linspace(0.1, 1, len(each)).view(-1, *[1] * (each.ndim - 1))
        before = {name: _kept(each).detach().clone() for name, each in weights.items()}
        gradients = {name: each.main_grad.clone() for name, each in weights.items()}
        made.step()
        steps = {name: (before[name] - _kept(each).detach()) / RATE for name, each in weights.items()}
    found = {_short(name): each.flatten() for name, each in steps.items()}
    for name, each in gradients.items():
        if (heads := _heads(model, name)) is not None:
            found[f"right of {_short(name)}"] = _in_two(each, heads, settings).flatten()
    return found


def _model(gated: bool = True, latent: bool = False, experts: int | None = None) -> Any:
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    torch.manual_seed(69)
    sizes: dict[str, Any] = {
        "num_layers": 1, "hidden_size": HIDDEN, "ffn_hidden_size": WIDTH, "num_attention_heads": HEADS, "gated_linear_unit": gated,
        "activation_func": torch.nn.functional.silu, "add_bias_linear": False, "use_cpu_initialization": True, "bias_activation_fusion": False,
        "num_moe_experts": experts, "tensor_model_parallel_size": torch.distributed.get_world_size(),
    }  # fmt: skip
    if experts:
        sizes |= {"sequence_parallel": sizes["tensor_model_parallel_size"] > 1, "moe_token_dispatcher_type": "allgather"}
    if latent:
        channels = {"qk_head_dim": KEYS, "qk_pos_emb_head_dim": 4, "v_head_dim": VALUES, "kv_lora_rank": LATENT, "q_lora_rank": LATENT}
        config: Any = MLATransformerConfig(**sizes, **channels, rope_type="rope")
    else:
        config = TransformerConfig(**sizes)
    layer = get_gpt_layer_local_spec(experts, False, multi_latent_attention=latent)
    layer.submodules.self_attention.submodules.core_attention = torch.nn.Identity  # it has no weights
    return GPTModel(config, layer, 32, 8)


def _kept(parameter: Any) -> Any:
    """Return the weights that the optimizer changes."""
    return getattr(parameter, "main_param", parameter)


def _short(name: str) -> str:
    return name.removeprefix("decoder.layers.0.").removesuffix(".weight")


def _heads(model: Any, name: str) -> int | None:
    """Return how many times rows of one matrix and of the other take turns, None for a parameter that holds one matrix."""
    if "linear_fc1" in name:
        return 1 if model.config.gated_linear_unit else None
    ranks = model.config.tensor_model_parallel_size
    return HEADS // ranks if "linear_kv_up_proj" in name else None


def _in_two(gradient: Any, heads: int, settings: Mapping[str, Any]) -> Any:
    """Return this rank's rows of the steps of two matrices.

    Args:
        gradient: rows of this rank, of all columns.
        heads: in each of which rows of the first are before rows of the second.
        settings: of the optimizer.
    """
    import torch
    from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

    alone = settings.get("muon_tp_mode", "blockwise") == "blockwise"
    ranks, rank = (1, 0) if alone else (torch.distributed.get_world_size(), torch.distributed.get_rank())
    rows = len(gradient) // heads
    first = KEYS if heads * (KEYS + VALUES) == len(gradient) else rows // 2
    steps = []
    for part in gradient.view(heads, rows, -1).split([first, rows - first], 1):
        parts = [part.contiguous().clone() for _ in range(ranks)]
        if not alone:
            torch.distributed.all_gather(parts, part.contiguous())
        whole = torch.cat(parts).flatten(0, 1)
        with_scale = newton_schulz(whole, STEPS, "quintic") * get_muon_scale_factor(*whole.shape, mode=settings.get("muon_scale_mode", "spectral"))
        steps.append(with_scale.view(ranks, heads, -1, with_scale.shape[-1])[rank])
    return torch.cat(steps, 1)


_case = functools.partial(Case, overlay=OVERLAY, device="cpu", versions=("emerging-optimizers", "torch"))
CASES = (
    _case(name="gated-mlp-cpu", run=_run),
    _case(name="latent-attention-cpu", run=functools.partial(_run, latent=True, masters=True)),
    _case(name="experts-cpu", run=functools.partial(_run, experts=2, muon_split_qkv=False)),
    _case(name="tensor-parallel-cpu", run=functools.partial(_run, ranks=2, muon_tp_mode="duplicated")),
)
