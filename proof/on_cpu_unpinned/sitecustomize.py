"""The answers of `proof/on_cpu`, and tensors that are not pinned, which takes a driver; Python imports this by itself.

Context-parallel ranks hand over the numbers of their parts of a sequence in pinned memory. It holds the same numbers.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

runpy.run_path(str(Path(__file__).resolve().parents[1] / "on_cpu" / "sitecustomize.py"), run_name="on_cpu")


@wrapt.when_imported("torch")
def do_not_pin(torch: ModuleType) -> None:
    """Let tensors that ask for pinned memory be made in any."""
    wrapt.wrap_function_wrapper(torch, "tensor", _unpinned)


def _unpinned(make: Callable[..., Any], _torch: Any, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
    return make(*given, **{**named, "pin_memory": False})
