"""Optimizer state of frozen parameters that torch's distributed checkpoints load: is it the state that the checkpoint has?

A real AdamW trains two layers and is saved. Then the first layer is frozen and the checkpoint is loaded, in each of the forms that a checkpoint of torch can have. On two gloo ranks layers are
sharded by `fully_shard`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, on_ranks

OVERLAY = "dcp-frozen-optimizer-state"
MODULE = "torch.distributed.checkpoint.state_dict"
RANKS, WIDTH, STEPS = 2, 8, 3
FORMS: Mapping[str, Mapping[str, Any]] = {
    "nested": {},
    "flat": {"flatten_optimizer_state_dict": True},
    "whole": {"full_state_dict": True},
}
SHARDED = {**FORMS, "broadcast": {"full_state_dict": True, "broadcast_from_rank0": True}}


def made(*, learns: bool = True, mesh: Any = None, name: str = "AdamW", **more: Any) -> tuple[Any, Any]:
    """Return two layers, the first one frozen or not, and an optimizer of both."""
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(75)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    model[0].requires_grad_(learns)
    if mesh is not None:
        for each in (*model, model):
            fully_shard(each, mesh=mesh)
    return model, getattr(torch.optim, name)(model.parameters(), **{"lr": 0.01, **more})


def step(model: Any, optimizer: Any, seed: int = 0) -> None:
    """Take a step on random rows."""
    import torch

    optimizer.zero_grad()
    model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    optimizer.step()


def saved(*, mesh: Any = None, steps: int = STEPS, **options: Any) -> tuple[Any, Any, Any]:
    """Return layers and an optimizer after steps of both layers, and the checkpoint of the optimizer."""
    from torch.distributed.checkpoint import state_dict as dcp

    model, optimizer = made(mesh=mesh)
    for number in range(steps):
        step(model, optimizer, number)
    options.pop("broadcast_from_rank0", None)
    return model, optimizer, dcp.get_optimizer_state_dict(model, optimizer, options=dcp.StateDictOptions(**options))


def numbers(model: Any, optimizer: Any) -> Any:
    """Return all state of an optimizer in one row, this rank's part; zeros where it has none."""
    import torch

    def part(value: Any) -> Any:
        return (value.to_local() if hasattr(value, "to_local") else value).detach().flatten().double()

    found = []
    for each in model.parameters():
        state = optimizer.state.get(each, {})
        moments = [part(state[name]) if name in state else torch.zeros_like(part(each)) for name in ("exp_avg", "exp_avg_sq")]
        found += [*moments, part(state["step"]) if "step" in state else torch.zeros(1, dtype=torch.float64)]
    return torch.cat(found)


def _loaded(mesh: Any = None, rank: int = 0, **options: Any) -> tuple[Any, Any]:
    """Return the state that was saved and the state that is loaded with the first layer frozen."""
    from torch.distributed.checkpoint import state_dict as dcp

    model, optimizer, checkpoint = saved(mesh=mesh, **options)
    if rank and options.get("broadcast_from_rank0"):
        checkpoint = {}
    other, restored = made(learns=False, mesh=mesh)
    dcp.set_optimizer_state_dict(other, restored, checkpoint, options=dcp.StateDictOptions(**options))
    return numbers(model, optimizer), numbers(other, restored)


def _off(right: Any, found: Any) -> float:
    return float((found - right).norm() / right.norm())


def _run() -> Behaviour:
    found = {name: _off(*_loaded(**options)) for name, options in FORMS.items()}
    words = ", ".join(f"{name} {off:.1e}" for name, off in found.items())
    return Behaviour(broken=any(found.values()), seen=f"loaded state, with one of two layers frozen, is off by: {words}")


def _run_sharded() -> Behaviour:
    importlib.import_module(MODULE)  # ranks are forked

    found = on_ranks(RANKS, _sharded)
    off = {name: max(_off_of(found, name, rank) for rank in range(RANKS)) for name in SHARDED}
    words = ", ".join(f"{name} {each:.1e}" for name, each in off.items())
    return Behaviour(broken=any(off.values()), seen=f"loaded state of {RANKS} ranks, with one of two layers frozen, is off by: {words}")


def _off_of(found: Mapping[str, Any], name: str, rank: int) -> float:
    import torch

    return _off(*(torch.tensor(found[f"rank {rank}, {each} {name}"]) for each in ("right", "loaded")))


def _sharded(rank: int) -> Mapping[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh, found = init_device_mesh("cpu", (RANKS,)), {}
    for name, options in SHARDED.items():
        found[f"right {name}"], found[f"loaded {name}"] = _loaded(mesh, rank, **options)
    return found


CASES = (
    Case(name="frozen-cpu", overlay=OVERLAY, device="cpu", versions=("torch",), run=_run),
    Case(name="sharded-cpu", overlay=OVERLAY, device="cpu", versions=("torch",), run=_run_sharded),
)
