"""A program that is launched again and again, with arguments that differ in one number."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megacpp_overlays.kernels.masked_products.direct_launches import directly
from megacpp_overlays.kernels.masked_products.launches_triton import CAN_BE_EARLY


class Launches:
    """Launches of one Triton program, of which the first alone looks at its arguments.

    To find out for which kinds of arguments a program is compiled takes longer than to launch it, and so does asking
    tensors and the driver where they are. Blocks of logits of which few rows count leave a device idle while its host does.

    On compute capability 9 and above the device begins such a program, if asked to, while the one ahead of it ends (programmatic
    dependent launch), so empty ones cost little. Each waits for all memory operations of the programs ahead before it
    touches any memory.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int],
        numbered: str,
        arguments: dict[str, Any],
        device: torch.device,
        *,
        early: bool = False,
        **options: int,
    ):
        """Prepare launches.

        Args:
            kernel: a program, or its replacement in the interpreter.
            grid: how many of it run.
            numbered: the parameter that differs. The program must not be specialised for it.
            arguments: all others by name.
            device: of the arguments, and the current one at every launch.
            early: whether it may begin while the program ahead ends, where the device can do that. The first statement of such
                a program is `launches_triton.wait_for_what_is_ahead`, whose argument is one more parameter, `EARLY`.
            options: for the compiler.
        """
        self._kernel, self._grid = kernel, (*grid, 1)
        self._options, self._arguments = options, arguments
        if early:
            now = begins_early(device)
            self._arguments = {**arguments, "EARLY": now}
            self._options = {**options, "launch_pdl": True} if now else options
        self._numbered = numbered
        self._compiled: Any = None
        self._again: Callable[[int], None] | None = None

    def __call__(self, number: int) -> None:
        """Launch it."""
        if self._again is not None:
            self._again(number)
        elif self._compiled is not None:  # as it never is in the interpreter
            self._again = self._prepared()
            self._again(number)
        else:
            arguments = {**self._arguments, self._numbered: number}
            self._compiled = self._kernel[self._grid](**arguments, **self._options)

    def _prepared(self) -> Callable[[int], None]:
        names = self._kernel.arg_names
        values = [self._arguments.get(name) for name in names]
        return directly(self._compiled, self._grid, values, names.index(self._numbered))


@functools.cache
def begins_early(device: torch.device) -> bool:
    """Return whether the device begins a program while the one ahead of it ends."""
    return CAN_BE_EARLY and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
