"""The moment before the first step of any optimizer of torch in a process."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


def before_the_first_step(module: ModuleType, call: Callable[[], None]) -> None:
    """Call a function once, before the first step; what it raises ends that step.

    torch is asked for its own hook of optimizers, which is taken out before the function is called. A step that is compiled has a graph
    break there, and cannot be compiled with `fullgraph=True`.

    Args:
        module: `torch.optim.optimizer`.
        call: the function.
    """
    handle: Any = None

    def first(*_: object) -> None:
        handle.remove()
        call()

    vars(first)["_torchdynamo_disable"] = True  # torch.compile calls it, and does not look into it
    handle = module.register_optimizer_step_pre_hook(first)
