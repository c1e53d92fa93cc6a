"""Optimizers whose state a distributed checkpoint is asked for before the first step: is their first update that of a fresh optimizer?

Real optimizers of `torch.optim` take one step on a linear layer, once as they are and once after `get_optimizer_state_dict`. On two gloo ranks the layer is sharded by `fully_shard`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, on_ranks

OVERLAY = "dcp-fresh-optimizer-state"
MODULE = "torch.distributed.checkpoint.state_dict"
RANKS, WIDTH = 2, 8
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "AdamW": {"weight_decay": 0.1},
    "Adam": {"weight_decay": 0.1},
    "NAdam": {},
    "RAdam": {},
    "Adafactor": {},
    "ASGD": {},
    "Rprop": {},
}


ON_GPU: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "AdamW, fused": ("AdamW", {"fused": True}),
    "AdamW, capturable": ("AdamW", {"capturable": True}),
    "Adam, fused": ("Adam", {"fused": True}),
    "RAdam, capturable": ("RAdam", {"capturable": True}),
}


def _run_on_gpu() -> Behaviour:
    found = {name: _off(each, device="cuda", **more) for name, (each, more) in ON_GPU.items()}
    words = ", ".join(f"{name} {off:.1e}" for name, off in found.items())
    return Behaviour(broken=any(found.values()), seen=f"first updates after get_optimizer_state_dict are off by: {words}")


def _run() -> Behaviour:
    found = {name: _off(name) for name in OPTIMIZERS}
    words = ", ".join(f"{name} {off:.1e}" for name, off in found.items())
    return Behaviour(broken=any(found.values()), seen=f"first updates after get_optimizer_state_dict are off by: {words}")


def _run_sharded() -> Behaviour:
    importlib.import_module(MODULE)  # ranks are forked

    found = on_ranks(RANKS, _sharded)
    off = max(max(values) for name, values in found.items() if name.endswith("off"))
    counters = sorted({each for name, values in found.items() if name.endswith("step") for each in values})
    return Behaviour(broken=off > 0 or counters != [0.0], seen=f"AdamW on {RANKS} ranks: counters are {counters} before the first step, whose update is off by {off:.1e}")


def _off(name: str, **more: Any) -> float:
    """Return how far the update of an optimizer after asking is off, relative to the one without."""
    right, asked = (updated(name, asks=asks, **more) for asks in (False, True))
    return float((asked - right).abs().max() / right.abs().max())


def made(name: str = "AdamW", *, device: str = "cpu", **more: Any) -> tuple[Any, Any]:
    """Return a layer, and an optimizer of it by its name in `torch.optim`."""
    import torch

    torch.manual_seed(59)
    model = torch.nn.Linear(WIDTH, WIDTH).to(device)
    return model, getattr(torch.optim, name)(model.parameters(), **{"lr": 0.01, **OPTIMIZERS.get(name, {}), **more})


def step(model: Any, optimizer: Any, seed: int = 0) -> None:
    """Take a step on random rows."""
    import torch

    optimizer.zero_grad()
    rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    model(rows.to(model.weight.device)).square().sum().backward()
    optimizer.step()


def updated(name: str, *, asks: bool, **more: Any) -> Any:
    """Return what a first step adds to the weights, after asking for the state of the optimizer or without."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer = made(name, **more)
    if asks:
        get_optimizer_state_dict(model, optimizer)
    before = model.weight.detach().clone()
    step(model, optimizer)
    return model.weight.detach() - before


def _sharded(_rank: int) -> Mapping[str, Any]:
    import torch
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, updates, counters = init_device_mesh("cpu", (RANKS,)), [], torch.zeros(1)
    for asks in (False, True):
        torch.manual_seed(59)
        model = fully_shard(torch.nn.Linear(WIDTH, WIDTH), mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if asks:
            saved = get_optimizer_state_dict(model, optimizer)
            counters = torch.stack([each["step"] for each in saved["state"].values()]).clone()
        before = model.weight.to_local().detach().clone()
        step(model, optimizer)
        updates.append(model.weight.to_local().detach() - before)
    return {"off": (updates[1] - updates[0]).abs().max().reshape(1), "step": counters}


CASES = (
    Case(name="first-step-cpu", overlay=OVERLAY, device="cpu", versions=("torch",), run=_run),
    Case(name="sharded-cpu", overlay=OVERLAY, device="cpu", versions=("torch",), run=_run_sharded),
    Case(name="fused-gpu", overlay=OVERLAY, device="cuda", versions=("torch",), run=_run_on_gpu),
)
