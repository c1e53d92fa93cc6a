"""Answer what code of a module asks for otherwise, in this thread alone, for as long as a witness or a self-test runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def answer(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is ours in the thread that asked for it, and theirs in any other."""
    here = threading.get_ident()
    return lambda *args, **kwargs: (ours if threading.get_ident() == here else theirs)(*args, **kwargs)


class Instead:
    """A module with some of its names replaced, for whoever holds this object."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
