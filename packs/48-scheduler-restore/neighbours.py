"""Restored schedules that are right without the overlay: in fresh schedulers, and where a caller sets the counter."""

from __future__ import annotations

import functools
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)
CHECKED = {"use_checkpoint_opt_param_scheduler": False}
OLD = {"max_lr": "start_lr", "lr_warmup_steps": "warmup_iter", "lr_decay_steps": "end_iter", "num_steps": "num_iters"}


def _restored(used: int = 0, before: Any = None, after: Any = None, *, old: bool = False, **other: Any) -> Any:
    """Return the rates of a schedule that is restored between counters that a caller sets, and those of a step later."""
    saved, made = PACK.scheduler(PACK.SAVED).state_dict(), PACK.scheduler(used, **other)
    if old:  # as old checkpoints have it, without weight decay
        saved = {OLD.get(key, key): value for key, value in saved.items() if "wd" not in key}
    if before is not None:
        made.num_steps = before
    made.load_state_dict(saved)
    if after is not None:
        made.num_steps = after
        made.step(0)
    found = PACK.rates(made)
    made.step(1)
    return {"restored": found, "a step later": PACK.rates(made)}


ASKED: dict[str, dict[str, Any]] = {
    "fresh": {},
    "fresh-checked": CHECKED,
    "fresh-overridden": {**CHECKED, "override_opt_param_scheduler": True, "max_lr": 2e-3, "end_wd": 0.3},
    "fresh-old-names-constant-decay": {"old": True, "start_wd": 0.2, "wd_incr_style": "constant"},
    "zeroed-before": {"used": 500, "before": 0},
    "set-after": {"used": 500, "after": 320, "end_wd": 0.1},
}
NEIGHBOURS = tuple(
    Neighbour(name=name, overlay="scheduler-restore", run=functools.partial(_restored, **asked))
    for name, asked in ASKED.items()
)
