"""The moment before the first step of any optimizer of torch in a process."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

_waiting: list[Callable[[], None]] = []
"""Functions to call; they share one hook of torch."""


def before_the_first_step(module: ModuleType, call: Callable[[], None]) -> None:
    """Call a function once, before the first step; an exception of it ends that step.

    This uses torch's own hook of optimizers. A compiled step has a graph break at the hook, and cannot be compiled with
    `fullgraph=True`. The hook is removed before the function is called, unless another library has registered a hook after it:
    torch is iterating over the hooks then, and a missing one ends the step with an error. Such a hook stays and does nothing.

    Args:
        module: `torch.optim.optimizer`.
        call: the function.
    """
    _waiting.append(call)
    if len(_waiting) > 1:
        return
    handle: Any = None

    def first(*_: object) -> None:
        calls = [*_waiting]
        _waiting.clear()
        if _is_last(handle):
            handle.remove()
        for each in calls:
            each()

    vars(first)["_torchdynamo_disable"] = True  # torch.compile calls it, and does not look into it
    handle = module.register_optimizer_step_pre_hook(first)


def _is_last(handle: Any) -> bool:
    """Return whether a hook is the last of those that torch calls, so that it can be taken out while torch calls them."""
    hooks = handle.hooks_dict_ref()
    return bool(hooks) and next(reversed(hooks)) == handle.id
