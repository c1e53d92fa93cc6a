"""Restoring of a schedule of learning rate and weight decay to the saved number of steps.

Upstream's `load_state_dict` runs from a counter of zero, and a step of zero then sets the optimizer's rates from the restored values. Both
have no effect where upstream is repaired, or a caller sets the counter. A state that upstream refuses leaves the schedule unchanged.

Source: https://github.com/NVIDIA/Megatron-LM/pull/7468
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import scheduler_restore as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime.in_this_thread import answer


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def load_state_dict(self: Any, state_dict: Any, **more: Any) -> None:
        found, rates = dict(vars(self)), _rates(self)
        self.num_steps = 0
        try:
            original(self, state_dict, **more)
        except BaseException:
            vars(self).update(found)
            if _rates(self) != rates:  # upstream has taken a step before it raised
                self.step(increment=0)
            raise
        self.step(increment=0)

    return load_state_dict


def _rates(scheduler: Any) -> list[tuple[float, ...]]:
    """Return learning rate and weight decay of each group of the optimizer."""
    names = ("lr", "weight_decay")
    groups = scheduler.optimizer.param_groups
    return [tuple(float(group[name]) for name in names if name in group) for group in groups]


def observe(module: ModuleType) -> Observation:
    """Restore 2 steps of 8, and twice the weight decay, in a scheduler that has taken 4."""
    group: dict[str, float] = {}
    log = module.log_single_rank  # which may warn that there are no ranks yet
    module.log_single_rank = answer(lambda *_: None, log)  # type: ignore[attr-defined]
    try:
        arguments = 0.0, 1.0, 0.0, 0, 8, "linear", 0.0, 0.5, 8, "linear"
        made = getattr(module, feature.CLASS)(SimpleNamespace(param_groups=[group]), *arguments)
        made.step(4)
        made.load_state_dict({**made.state_dict(), "num_steps": 2, "end_wd": 1.0})
    finally:
        module.log_single_rank = log  # type: ignore[attr-defined]
    found = made.num_steps, group["lr"], group["weight_decay"]
    seen = f"steps, learning rate and weight decay of (2, 0.75, 0.25) are restored as {found}"
    return Observation(broken=found != (2, 0.75, 0.25), seen=seen)


OVERLAY = Overlay(
    id="scheduler-restore",
    pack=48,
    title="restore a schedule of learning rate and weight decay to the steps that were saved",
    target=feature.TARGET,
    probe=feature.probe,
    replacements=dict.fromkeys((feature.ADDED, feature.ADDED_EARLY), (Replacement(symbol=feature.METHOD, make=_make),)),
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "loss jumps after resume or rollback",
        "learning rate is wrong after resume or rollback",
        "learning rate decays too early after a rollback in the same process",
        "weight decay is wrong in the first step after resume",
    ),
    concerns="every model",
    breaks="after a rollback the schedule goes on from the sum of both counters, and the first update after a resume may have "
    "the weight decay of the arguments",
    retire_when="load_state_dict sets the counter, and sets rates after weight decay is restored",
    brief="counters of restored schedules",
    until="the counter is set",
    threads=(Thread(repository="NVIDIA/Megatron-LM", number=7468, state="open, opened 2026-09-18, keeps the sum"),),
    last_validated="2026-11-27, x86-64 without GPU, torch 2.11.0: megatron-core 0.9.0, 0.12.0, 0.16.1 and 0.19.2, main "
    "d98e8a64dd and dev d48bd6be0a; 0.9.0 to 0.19.2 read",
)
