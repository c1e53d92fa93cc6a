"""Megatron-FSDP's optimizer: does it make the updates that the same optimizer makes of a model that is not sharded?

Two ranks, which are forked and meet with gloo, train a real `MegatronFSDP` of two linear layers for three steps, and the same layers as
they are with the sum of the ranks' gradients. Compared are all weights before the first step, what the first step changes, and
how far weights are apart in the end, with Adam and AdamW of torch, where parameters are sharded or gradients alone, and whether the
optimizer is prepared with its model or by itself.
Megatron-FSDP asks for a GPU in several places, and gets the CPU: streams do nothing, and tensors are where they are.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent, fsdp_on_cpu, on_ranks

PACKAGE = "megatron.core.distributed.fsdp.src.megatron_fsdp"
MODULE = f"{PACKAGE}.fully_shard"
RANKS, STEPS, HIDDEN = 2, 3, 4
RATE, DECAY = 0.01, 0.1
OPTIMIZERS = ("Adam", "AdamW")
SHARDED = ("optim_grads", "optim_grads_params")
TOGETHER = "fully_shard"
ENTRIES = (TOGETHER, "fully_shard_optimizer")
"""Functions that prepare an optimizer: with its model, or by itself."""
ROUNDING = 1e-5


def _run() -> Behaviour:
    import torch  # noqa: F401 - once, before the fork

    try:
        module = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        raise TargetAbsent("there is no Megatron-FSDP") from error
    if "model" in inspect.signature(module.fully_shard_optimizer).parameters:
        raise TargetAbsent("optimizers are sharded with their model, and no state is built")
    trainings = list(itertools.product(OPTIMIZERS, SHARDED, ENTRIES))

    def run(rank: int) -> Mapping[str, object]:
        fsdp_on_cpu()
        return {", ".join(training): _train(module, rank, *training) for training in trainings}

    numbers = on_ranks(RANKS, run)
    found = {name: kept for name in map(", ".join, trainings) if (kept := numbers[f"rank 0, {name}"])}
    if not found:
        raise TargetAbsent("no state is built before the first step")
    errors = {name: max(moved, abs(times - 1), apart) for name, (moved, times, apart) in found.items()}
    worst = max(errors, key=errors.__getitem__)
    moved, times, apart = found[worst]
    return Behaviour(
        broken=errors[worst] > ROUNDING,
        seen=f"of {len(found)} optimizers the one of {worst} leaves weights {moved:.1e} off before the first step, which is "
        f"{times:.4f} of what it should be, and {apart:.1e} off after {STEPS}",
    )


def _train(module: ModuleType, rank: int, name: str, sharded: str, entry: str) -> tuple[float, ...]:
    """Return how far weights are off before the first step, how much of its change that makes, and how far they are off at the end.

    Nothing where the optimizer has no state before that.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(31)
    plain, copied = (torch.nn.Sequential(*(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(2))) for _ in range(2))
    copied.load_state_dict(plain.state_dict())
    make = functools.partial(getattr(torch.optim, name), lr=RATE, weight_decay=DECAY)
    options: dict[str, Any] = {
        "device_mesh": init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("dp", "tp")),
        "dp_shard_dim": "dp",
        "tp_dim": "tp",
        "fsdp_unit_modules": [torch.nn.Linear],
        "zero_dp_strategy": sharded,
        "device": torch.device("cpu"),
        "calculate_per_token_loss": True,  # sums over ranks: gloo has no means
    }
    if entry == TOGETHER:
        model, optimizer = module.fully_shard(module=copied, optimizer=make(copied.parameters()), **options)
    else:
        model = module.fully_shard_model(module=copied, **options)
        optimizer = module.fully_shard_optimizer(make(model.parameters()))
    optimizers = [optimizer, make(plain.parameters())]
    if not optimizer.state:
        return ()
    weights = [(_whole(model), _whole(plain))]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        states = torch.randn(3, HIDDEN, generator=generator)
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            each(states).square().mean().backward()
            if each is plain:
                for weight in plain.parameters():
                    torch.distributed.all_reduce(weight.grad)
            optimizer.step()
        weights.append((_whole(model), _whole(plain)))
    (before, expected), (after, expected_after) = weights[:2]
    times = (after - before).norm() / (expected_after - expected).norm()
    apart = [float((one - other).abs().max()) for one, other in weights]
    return apart[0], float(times), apart[-1]


def _whole(model: Any) -> Any:
    """Return all weights of a model in one row, as its optimizer has them."""
    import torch

    if hasattr(model, "_replace_param_with_distributed_if_needed"):
        model._replace_param_with_distributed_if_needed()  # noqa: SLF001 - optimizers are given what it puts there
    rows = [each.detach() for each in model.parameters()]
    return torch.cat([_gathered(each.to_local()) if hasattr(each, "to_local") else each.flatten().clone() for each in rows])


def _gathered(part: Any) -> Any:
    """Return what ranks hold of a parameter in one row: they have whole rows of it, in order and not equally many."""
    import torch

    parts: list[Any] = [None] * RANKS
    torch.distributed.all_gather_object(parts, part.flatten())
    return torch.cat(parts)


CASES = (
    Case(
        name="training-cpu",
        overlay="fsdp-optimizer-under-update",
        device="cpu",
        versions=("torch",),
        run=_run,
        targets=(MODULE,),
    ),
)
