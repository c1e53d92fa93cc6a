"""Triton's interpreter, without work that it does again for each call of a function inside a kernel.

A launch puts interpreted functions in the place of those of `triton.language`, by looking at every member of it. Each call of
a jitted function inside the kernel does the same once more, though all is in place: a third of the time of kernels that are
written in small functions. And each operation makes a table of dtypes anew. The results stay the same.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any


class _NothingToRestore:
    def restore(self) -> None:
        """Do nothing: the launch restores the functions that it replaced."""


def hasten() -> None:
    """Change the interpreter of this process, for good."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, dtype_of = interpreter._patch_lang, interpreter._get_np_dtype
    in_place: set[int] = set()
    dtypes: dict[Any, Any] = {}

    def patch_once(function: FunctionType) -> Any:
        languages = {id(each) for each in function.__globals__.values() if each is tl or each is tl.core}
        if languages and languages <= in_place:
            return _NothingToRestore()
        scope = patch(function)
        if not in_place:  # a launch, which restores; a call inside a kernel must not
            in_place.update(languages)
            restore = scope.restore

            def restore_and_forget() -> None:
                in_place.clear()
                restore()

            scope.restore = restore_and_forget
        return scope

    def remembered_dtype_of(dtype: Any) -> Any:
        name = str(dtype)
        if name not in dtypes:
            dtypes[name] = dtype_of(dtype)
        return dtypes[name]

    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = remembered_dtype_of
