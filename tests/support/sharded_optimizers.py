"""Run in a fresh interpreter: optimizers of a real Megatron-FSDP model on the CPU, with the overlay and without it; JSON.

    python tests/support/sharded_optimizers.py

The release is the one that is first on the path. Each optimizer trains a model that is sharded, on one rank, and the same model as it
is. Megatron-FSDP asks for a GPU, and gets the CPU.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from typing import Any

import megacpp_overlays

# isort: split
import torch
from torch.distributed.device_mesh import init_device_mesh

from megacpp_overlays.repro import fsdp_on_cpu

PACKAGE = "megatron.core.distributed.fsdp.src.megatron_fsdp"
ID = "fsdp-optimizer-under-update"
HIDDEN, STEPS = 4, 3
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adam": {"lr": 0.01, "weight_decay": 0.1},
    "SGD": {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.9},
}
WAYS = ("by itself", "with the model", "and nothing is sharded")
"""How an optimizer is prepared."""


def layers() -> torch.nn.Module:
    torch.manual_seed(31)
    return torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN))


def sharded(name: str, way: str) -> tuple[Any, Any]:
    """Return a model and its optimizer."""
    package = importlib.import_module(PACKAGE)
    model, make = layers(), getattr(torch.optim, name)
    how = {
        "device_mesh": init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")),
        "dp_shard_dim": "dp",
        "tp_dim": "tp",
        "fsdp_unit_modules": [torch.nn.Linear],
        "zero_dp_strategy": "no_shard" if way == WAYS[2] else "optim_grads_params",
        "device": torch.device("cpu"),
        "calculate_per_token_loss": True,  # gloo has no means over ranks
    }
    if way == WAYS[1]:
        both: tuple[Any, Any] = package.fully_shard(model, make(model.parameters(), **OPTIMIZERS[name]), **how)
        return both
    model = package.fully_shard_model(model, **how)
    return model, package.fully_shard_optimizer(make(model.parameters(), **OPTIMIZERS[name]))


def weights(model: Any) -> list[float]:
    found = [each.detach() for each in model.parameters()]
    return torch.cat([getattr(each, "_local_tensor", each).flatten() for each in found]).tolist()


def trained(model: Any, optimizer: Any) -> list[list[float]]:
    """Return weights before the first step and after each."""
    generator = torch.Generator().manual_seed(4)
    found = [weights(model)]
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(3, HIDDEN, generator=generator)).square().mean().backward()
        optimizer.step()
        if hasattr(model, "_replace_param_with_distributed_if_needed"):
            model._replace_param_with_distributed_if_needed()
        found.append(weights(model))
    return found


def state(optimizer: Any) -> list[Any]:
    """Return what a checkpoint would be loaded into: names of the state of each parameter, and how many steps it counts."""
    found = optimizer.state_dict()["state"].values()
    return [[sorted(each), float(each.get("step", 0))] for each in found]


def facts() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, settings in OPTIMIZERS.items():
        plain = layers()
        found[name] = {"plain": trained(plain, getattr(torch.optim, name)(plain.parameters(), **settings))}
        for way in WAYS:
            model, optimizer = sharded(name, way)
            before = state(optimizer)
            found[name][way] = {"trained": trained(model, optimizer), "state": [before, state(optimizer)]}
    return found


def main() -> None:
    """Answer on standard output."""
    torch.set_num_threads(1)
    importlib.import_module(PACKAGE)
    fsdp_on_cpu()
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    records = {each.overlay.id: each for each in megacpp_overlays.audit().records}
    answer: dict[str, Any] = {"decision": records[ID].decision.value, "on": facts()}
    megacpp_overlays.undo()
    sys.stdout.write(json.dumps({**answer, "off": facts()}))


if __name__ == "__main__":
    main()
