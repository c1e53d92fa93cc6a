"""Optimizers that load the same state without the overlay: where nothing is frozen, and where a checkpoint has no state of what is frozen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)


def _loaded(
    *, learns: bool = False, drops: bool = False, trained: bool = False, name: str = "AdamW", **options: Any
) -> Mapping[str, list[float]]:
    """Return weights, state and frozen parameters after a checkpoint was loaded and a step was taken.

    Args:
        learns: whether the first layer does.
        drops: take its state out of the checkpoint, as of one that never learned.
        trained: take a step before.
        name: of an optimizer.
        options: of the checkpoint.
    """
    from torch.distributed.checkpoint import state_dict as dcp

    _, _, checkpoint = PACK.saved(**options)
    if drops:
        kept = checkpoint.get("state", checkpoint)
        for key in [key for key in kept if key.removeprefix("state.").startswith("0.")]:
            del kept[key]
    model, optimizer = PACK.made(learns=learns, name=name)
    if trained:
        PACK.step(model, optimizer)
    dcp.set_optimizer_state_dict(model, optimizer, checkpoint, options=dcp.StateDictOptions(**options))
    PACK.step(model, optimizer, 4)
    return _numbers(model, optimizer)


def _outside(**options: Any) -> Mapping[str, list[float]]:
    """Return the same of an optimizer that has no frozen parameters, as launchers for fine-tuning build it."""
    import torch
    from torch.distributed.checkpoint import state_dict as dcp

    _, _, checkpoint = PACK.saved(**options)
    model, _ = PACK.made(learns=False)
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.01)
    dcp.set_optimizer_state_dict(model, optimizer, checkpoint, options=dcp.StateDictOptions(**options))
    PACK.step(model, optimizer, 4)
    return _numbers(model, optimizer)


def _refused() -> Mapping[str, list[float]]:
    """Return 1 where a checkpoint without the state of a parameter that learns is refused, and what is frozen afterwards."""
    from torch.distributed.checkpoint import state_dict as dcp

    _, _, checkpoint = PACK.saved()
    model, optimizer = PACK.made(learns=False)
    del checkpoint["state"]["1.weight"]
    try:
        dcp.set_optimizer_state_dict(model, optimizer, checkpoint)
    except RuntimeError:
        return {"refused": [1.0, *(float(each.requires_grad) for each in model.parameters())]}
    return {"refused": [0.0]}


def _numbers(model: Any, optimizer: Any) -> Mapping[str, list[float]]:
    import torch

    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    learning = [float(each.requires_grad) for each in model.parameters()]
    return {"weights": weights.tolist(), "state": PACK.numbers(model, optimizer).tolist(), "learning": learning}


ASKED: Mapping[str, Callable[[], Mapping[str, list[float]]]] = {
    **{f"all-learn-{form}": functools.partial(_loaded, learns=True, **options) for form, options in PACK.FORMS.items()},
    **{
        f"never-learned-{form}": functools.partial(_loaded, drops=True, **options)
        for form, options in PACK.FORMS.items()
    },
    "never-learned-trained": functools.partial(_loaded, drops=True, trained=True),
    "frozen-outside-the-optimizer": _outside,
    "frozen-outside-the-optimizer-flat": functools.partial(_outside, flatten_optimizer_state_dict=True),
    "a-parameter-that-learns-has-no-state": _refused,
}
NEIGHBOURS = tuple(Neighbour(name=name, overlay=PACK.OVERLAY, run=run) for name, run in ASKED.items())
