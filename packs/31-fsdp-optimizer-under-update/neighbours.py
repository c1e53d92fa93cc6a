"""Optimizers of Megatron-FSDP that are right without the overlay: what they keep is zero after an update by nothing, and no number of steps
corrects it."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, TargetAbsent, beside, fsdp_on_cpu, on_ranks

PACK = beside(__file__)
HALVED_AFTER = 2
"""Steps."""


def _trained(name: str, sharded: str, *, scheduled: bool = False, **settings: Any) -> Mapping[str, object]:
    """Return weights before the first step and after each, the rates of learning, and moments in the end.

    Args:
        name: of an optimizer of torch.
        sharded: what is sharded.
        scheduled: whether a scheduler, which puts a step of its own on the optimizer, is there before the optimizer is sharded.
        settings: of the optimizer.
    """
    import torch

    try:
        module = importlib.import_module(PACK.MODULE)
    except ModuleNotFoundError as error:
        raise TargetAbsent("there is no Megatron-FSDP") from error
    if "model" in inspect.signature(module.fully_shard_optimizer).parameters:
        raise TargetAbsent("optimizers are sharded with their model, and no state is built")

    def run(rank: int) -> Mapping[str, Any]:
        fsdp_on_cpu()
        model = _sharded(module, sharded)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=PACK.RATE, **settings)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, HALVED_AFTER, 0.5) if scheduled else None
        optimizer = module.fully_shard_optimizer(optimizer)
        weights, rates = [PACK._whole(model)], list[float]()
        generator = torch.Generator().manual_seed(rank)
        for _ in range(PACK.STEPS):
            optimizer.zero_grad()
            model(torch.randn(3, PACK.HIDDEN, generator=generator)).square().mean().backward()
            optimizer.step()
            weights.append(PACK._whole(model))
            rates += [group["lr"] for group in optimizer.param_groups]
            if scheduler is not None:
                scheduler.step()
        return {"weights": torch.stack(weights), "rates": rates, **_moments(optimizer)}

    return on_ranks(PACK.RANKS, run)


def _sharded(module: Any, sharded: str) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(31)
    return module.fully_shard_model(
        module=torch.nn.Sequential(*(torch.nn.Linear(PACK.HIDDEN, PACK.HIDDEN) for _ in range(2))),
        device_mesh=init_device_mesh("cpu", (PACK.RANKS, 1), mesh_dim_names=("dp", "tp")),
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[torch.nn.Linear],
        zero_dp_strategy=sharded,
        device=torch.device("cpu"),
        calculate_per_token_loss=True,  # sums over ranks: gloo has no means
    )


def _moments(optimizer: Any) -> dict[str, Any]:
    """Return what the optimizer keeps of this rank's weights; it has counted a step too many without the overlay."""
    found: dict[str, list[Any]] = {}
    for state in optimizer.state.values():
        for key, each in state.items():
            own = each.to_local() if hasattr(each, "to_local") else each
            if key != "step" and own is not None and own.numel():
                found.setdefault(key, []).append(own)
    return found


def _neighbour(name: str, *asked: str, **settings: Any) -> Neighbour:
    run = functools.partial(_trained, *asked, **settings)
    return Neighbour(name=name, overlay="fsdp-optimizer-under-update", run=run)


NEIGHBOURS = (
    _neighbour("sgd", "SGD", "optim_grads_params"),
    _neighbour("sgd-momentum-scheduled", "SGD", "optim_grads", scheduled=True, momentum=0.9),
    _neighbour("rmsprop", "RMSprop", "optim_grads_params"),
    _neighbour("adam-without-memory", "Adam", "optim_grads_params", betas=(0.0, 0.0)),
)
