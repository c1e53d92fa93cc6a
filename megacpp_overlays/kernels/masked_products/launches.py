"""A program that is launched again and again, with arguments that differ in one number."""

from __future__ import annotations

from typing import Any


class Launches:
    """Launches of one Triton program, all but the first without looking at the arguments again.

    To find out for which kinds of arguments a program is compiled takes longer than to launch it.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int], numbered: str, arguments: dict[str, Any], **options: int):
        """Prepare launches.

        Args:
            kernel: a program, or what stands for it in the interpreter.
            grid: how many of it run.
            numbered: the parameter that differs. The program must not be specialised for it.
            arguments: all others by name.
            options: for the compiler.
        """
        self._kernel, self._grid, self._options = kernel, (*grid, 1), options
        self._numbered, self._arguments = numbered, arguments
        self._compiled: Any = None

    def __call__(self, number: int) -> None:
        """Launch it."""
        arguments = {**self._arguments, self._numbered: number}
        if self._compiled is None:
            self._compiled = self._kernel[self._grid](**arguments, **self._options)
        else:
            self._compiled[self._grid](*(arguments[name] for name in self._kernel.arg_names))
