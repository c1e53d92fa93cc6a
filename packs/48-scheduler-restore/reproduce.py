"""Megatron's schedule, saved and restored: does the next update have the rates of the run that saved it?"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent

MODULE = "megatron.core.optimizer_param_scheduler"
SAVED, LATER = 300, 500
LR = {"init_lr": 0.0, "max_lr": 1e-3, "min_lr": 1e-5, "lr_warmup_steps": 20, "lr_decay_steps": 1000}
DECAY = {"start_wd": 0.0, "end_wd": 0.2, "wd_incr_steps": 1000, "wd_incr_style": "linear"}
OTHER_DECAY = {"start_wd": 0.01, "end_wd": 0.01, "wd_incr_style": "constant"}
GROUPS: tuple[dict[str, float], ...] = ({}, {"wd_mult": 0.0}, {"lr_mult": 0.5, "max_lr": 5e-4, "min_lr": 2e-5})


def scheduler(steps: int, **other: Any) -> Any:
    """Return a scheduler of a real optimizer that has taken so many steps."""
    import torch

    try:
        module: Any = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        raise TargetAbsent(f"there is no {MODULE}") from error
    optimizer = torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.ones(1))], **group} for group in GROUPS])
    made = module.OptimizerParamScheduler(optimizer, **{"lr_decay_style": "cosine", **LR, **DECAY, **other})
    made.step(steps)
    return made


def rates(made: Any) -> list[float]:
    """Return the steps that a scheduler has taken, and learning rate and weight decay of each group of parameters."""
    groups = made.optimizer.param_groups
    return [made.num_steps, *(float(each[name]) for each in groups for name in ("lr", "weight_decay"))]


def _restored(*used: int, **other: Any) -> Behaviour:
    """Restore a schedule in schedulers with other arguments that have taken so many steps."""
    first, made = scheduler(SAVED), [scheduler(steps, **other) for steps in used]
    for each in made:
        each.load_state_dict(first.state_dict())
    steps, lr, wd, *_ = zip(*map(rates, (first, *made)), strict=True)
    seen = f"saved, and restored after {used} steps: steps {steps}, learning rates {lr}, weight decays {wd}"
    return Behaviour(broken=any(rates(each) != rates(first) for each in made), seen=seen)


_case = functools.partial(Case, overlay="scheduler-restore", device="cpu", versions=("torch",))
CASES = (
    _case(name="rollback-cpu", run=functools.partial(_restored, LATER)),
    _case(name="other-arguments-cpu", run=functools.partial(_restored, 0, LATER, **OTHER_DECAY)),
)
