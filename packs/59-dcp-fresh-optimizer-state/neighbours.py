"""Optimizers that checkpoints treat well without the overlay: trained ones, restored ones, some with gradients, and some without state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)


def _trained(steps: int = 2, name: str = "AdamW", **options: Any) -> Mapping[str, list[float]]:
    """Return weights and state of an optimizer that is asked between steps."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model, optimizer = PACK.made(name)
    for number in range(steps):
        PACK.step(model, optimizer, number)
    get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))
    PACK.step(model, optimizer, steps)
    return _numbers(model, optimizer)


def _restored(**options: Any) -> Mapping[str, list[float]]:
    """Return the same of an optimizer whose state is loaded before its first step."""
    from torch.distributed.checkpoint import state_dict as saved

    options = {"options": saved.StateDictOptions(**options)}
    (model, optimizer), (other, fresh) = PACK.made("Adam"), PACK.made("Adam", weight_decay=0.3)
    for number in range(3):
        PACK.step(model, optimizer, number)
    saved.set_optimizer_state_dict(other, fresh, saved.get_optimizer_state_dict(model, optimizer, **options), **options)
    PACK.step(other, fresh, 3)
    return _numbers(other, fresh)


def _with_gradients() -> Mapping[str, list[float]]:
    """Return the same of a fresh optimizer whose parameters have gradients: upstream makes no state."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer = PACK.made("Adam")
    model(model.weight.detach()).sum().backward()
    found = get_optimizer_state_dict(model, optimizer)
    optimizer.step()
    return {**_numbers(model, optimizer), "kept": [float(len(found["state"]))]}


def _settings() -> Mapping[str, list[float]]:
    """Return rates and decays of groups, and weights, of an optimizer that was asked and has taken no step."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer = PACK.made("AdamW", weight_decay=0.25)
    optimizer.add_param_group({"params": [], "lr": 0.5, "weight_decay": 0.0})
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
    get_optimizer_state_dict(model, optimizer)
    groups = [float(group[name]) for group in optimizer.param_groups for name in ("lr", "weight_decay")]
    return {"groups": groups, "weights": model.weight.flatten().tolist()}


def _numbers(model: Any, optimizer: Any) -> Mapping[str, list[float]]:
    import torch

    state = [
        torch.as_tensor(value).flatten()
        for kept in optimizer.state.values()
        for value in kept.values()
        if value is not None
    ]
    return {"weights": model.weight.flatten().tolist(), "state": torch.cat([*state, torch.zeros(1)]).tolist()}


ASKED: Mapping[str, Callable[[], Mapping[str, list[float]]]] = {
    "trained": _trained,
    "trained-flat": functools.partial(_trained, flatten_optimizer_state_dict=True),
    "trained-sgd-without-state": functools.partial(_trained, name="SGD"),
    "trained-adagrad-with-state-from-the-start": functools.partial(_trained, 0, "Adagrad"),
    "restored": _restored,
    "restored-flat": functools.partial(_restored, flatten_optimizer_state_dict=True),
    "restored-whole": functools.partial(_restored, full_state_dict=True),
    "gradients-are-there": _with_gradients,
    "settings-of-groups": _settings,
}
NEIGHBOURS = tuple(Neighbour(name=name, overlay=PACK.OVERLAY, run=run) for name, run in ASKED.items())
