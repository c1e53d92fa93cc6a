"""Models in mixed precision that are right without the overlays: casts of what nobody keeps in fp32, and the state of optimizers with
parameters of one kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)
HIDDEN, HEADS = 32, 8


# The cast


def _others() -> Mapping[str, object]:
    """Wrap a mixer whose fp32 parameters are kept: what lies beside them, buffers included, is cast."""
    import torch

    mixer = PACK._stand_in(HIDDEN, HEADS, seed=1)
    mixer.register_buffer("mean", torch.randn(HIDDEN, generator=torch.Generator().manual_seed(2)))
    return _values(_wrapped(mixer), but=PACK.FP32)


def _nothing_kept(*, fp16: bool) -> Mapping[str, object]:
    """Wrap a model of which nothing is kept, with tied weights and a frozen one, and let it learn."""
    import torch

    generator = torch.Generator().manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(3)))
    for each in model.parameters():
        each.data = torch.randn(each.shape, generator=generator) / 8
    model[2].weight = model[0].weight
    model[1].weight.requires_grad_(False)
    wrapped = _wrapped(model, fp16=fp16)
    row = torch.randn(5, HIDDEN, generator=generator).to(model[0].weight.dtype)
    output = wrapped(row)
    output.float().square().sum().backward()
    gradients = {f"gradient of {name}": each.grad for name, each in model.named_parameters() if each.grad is not None}
    flags = {
        "tied": float(model[2].weight is model[0].weight),
        "learns": [each.requires_grad for each in model.parameters()],
    }
    return {"output": output, **gradients, **flags, **_values(model)}


def _cast_before() -> Mapping[str, object]:
    """Wrap a mixer that was cast to fp16 as a whole: upstream casts what it declares to be fp32, too."""
    return _values(_wrapped(PACK._stand_in(HIDDEN, HEADS, seed=1).half()))


def _wrapped(model: Any, *, fp16: bool = False) -> Any:
    from megatron.core.transformer.module import Float16Module

    config = SimpleNamespace(fp16=fp16, bf16=not fp16, virtual_pipeline_model_parallel_size=None)
    return Float16Module(config, model).module


def _values(model: Any, but: Sequence[str] = ()) -> dict[str, Any]:
    """Return parameters and buffers, and how many bytes a value of each has."""
    found: dict[str, Any] = {}
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if name not in but:
            found |= {name: each, f"bytes of {name}": each.element_size()}
    return found


# Sharded state, without a GPU


def _state(*, trained: int, groups: int, is_loading: bool = False) -> Mapping[str, object]:
    """Return the sharded state of an optimizer whose parameters are all bf16, under the names that a checkpoint gives it.

    Args:
        trained: how many of three parameters had a step.
        groups: how many groups of the optimizer they are in.
        is_loading: whether it is asked for to read a checkpoint, which gives each parameter a state.
    """
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    generator = torch.Generator().manual_seed(16)
    names = "first", "second", "third"
    model = [torch.nn.Parameter(torch.randn(4, generator=generator).bfloat16()) for _ in names]
    main = [each.detach().clone().float() for each in model]
    options = dict.fromkeys(("lr_mult", "wd_mult", "is_expert_parallel", "is_decoupled_lr", "default_config"), 1.0)
    cut = [slice(None)] if groups == 1 else [slice(0, 1), slice(1, None)]
    inner = torch.optim.AdamW([{"params": main[each], **options} for each in cut], lr=0.1)
    for each in main[:trained]:
        each.grad = torch.randn(4, generator=generator)
    inner.step()
    optimizer = object.__new__(Float16OptimizerWithFloat16Params)
    vars(optimizer).update(
        optimizer=inner,
        config=SimpleNamespace(fp16=False, bf16=True),
        grad_scaler=None,
        init_state_fn=_give_all_a_state,
        is_stub_optimizer=False,
        float16_groups=[model[each] for each in cut],
        fp32_from_float16_groups=[main[each] for each in cut],
        fp32_from_fp32_groups=[[] for _ in cut],
    )
    sharded = {name: ShardedTensor.from_rank_offsets(name, each) for name, each in zip(names, model, strict=True)}
    state = optimizer.sharded_state_dict(sharded, is_loading)
    return {each.key: each.data for each in PACK._entries(state)}


def _give_all_a_state(optimizer: Any, _config: Any) -> None:
    import torch

    for group in optimizer.param_groups:
        for each in group["params"]:
            if not optimizer.state[each]:
                optimizer.state[each] = {
                    "step": torch.tensor(1.0),
                    "exp_avg": torch.full_like(each, 0.5),
                    "exp_avg_sq": torch.full_like(each, 0.25),
                }


def _neighbour(name: str, overlay: str, run: Callable[..., Mapping[str, object]], **options: Any) -> Neighbour:
    return Neighbour(name=name, overlay=overlay, run=functools.partial(run, **options))


_CAST, _STATE = "float16-fp32-exemption", "float16-optimizer-state-ids"
NEIGHBOURS = (
    _neighbour("cast-of-others", _CAST, _others),
    _neighbour("nothing-kept", _CAST, _nothing_kept, fp16=False),
    _neighbour("nothing-kept-in-fp16", _CAST, _nothing_kept, fp16=True),
    _neighbour("cast-before", _CAST, _cast_before),
    _neighbour("state-of-half-precision", _STATE, _state, trained=3, groups=1),
    _neighbour("state-of-two-groups", _STATE, _state, trained=2, groups=2),
    _neighbour("state-to-be-read", _STATE, _state, trained=1, groups=1, is_loading=True),
)
