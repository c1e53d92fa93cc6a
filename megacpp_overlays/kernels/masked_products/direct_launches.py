"""Launches of a compiled Triton program without Triton's work for each launch: the driver takes 3 microseconds, Triton 20.

For each launch Triton 3.6 encodes every tensor descriptor again, asks the driver about every pointer, and calls the hooks
of profilers even if there are none. Here descriptors and pointers are converted once to the arguments of Triton's launcher.
The launcher is Triton's own, so the program gets the same arguments. Triton launches if the launcher is not built like
that of 3.6, if a hook is set, or if the program needs scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

try:
    from triton import knobs
    from triton.backends.nvidia import driver
    from triton.runtime import driver as runtime
except ImportError:  # an older Triton has no knobs
    driver = None

_LAYOUT = "iiiKKppOOOOOO"
"""Format of the launcher's parameters ahead of the program's arguments.

They are the grid (3), the stream, the function, the flags for a cooperative grid and for programmatic dependent launch, global
and profile scratch memory, the program's metadata, and three objects for hooks.
"""
_STREAM = 3
"""Index of the stream among the launcher's arguments."""
_EXPANDS = ("launcher", "tensordesc_indices", "tensordesc_meta")
"""Free variables of the function that Triton wraps around the launcher of a program with tensor descriptors."""


def directly(compiled: Any, grid: tuple[int, int, int], values: list[Any], place: int) -> Callable[[int], None]:
    """Return a function that launches a program with another number as one of its arguments.

    The function keeps pointers of tensors, so the caller has to keep the tensors until the last launch. A launch goes to the
    stream that is current then, on the device that is current now.

    Args:
        compiled: a compiled Triton program.
        grid: the number of program instances along each axis.
        values: the arguments of the program, in order. Where Triton launches, each launch writes the number into this list.
        place: the index of the number in `values`.
    """
    arguments = _all_arguments(compiled, grid, values, place)

    def by_triton(number: int) -> None:
        values[place] = number
        compiled[grid](*values)

    if arguments is None:
        return by_triton
    launcher, flat, at = arguments
    device = torch.cuda.current_device()
    stream_of = runtime.active.get_current_stream

    def launch(number: int) -> None:
        flat[_STREAM] = stream_of(device)
        flat[at] = number
        launcher(*flat)

    return launch


def _all_arguments(
    compiled: Any, grid: tuple[int, int, int], values: list[Any], place: int
) -> tuple[Callable[..., None], list[Any], int] | None:
    """Return Triton's launcher, all its arguments, and the index of the number in them; None where Triton has to launch.

    The stream among the arguments is 0: each launch sets it.
    """
    if getattr(driver, "_BASE_ARGS_FORMAT", None) != _LAYOUT or _somebody_listens():
        return None
    run = compiled.run
    try:
        if run.global_scratch_size or run.profile_scratch_size:
            return None
        head = [
            *grid, 0, compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None,
            compiled.packed_metadata, None, None, None,
        ]  # fmt: skip
        launcher, descriptions = _launcher_of(run.launch)
    except AttributeError:
        return None
    flat, at = _expanded(values, descriptions, place)
    return launcher, head + flat, len(head) + at


def _launcher_of(launch: Any) -> tuple[Any, list[Any]]:
    """Return the launcher without Triton's wrapper, and the metadata by which each tensor descriptor is encoded.

    Raises:
        AttributeError: the wrapper is not built like that of Triton 3.6.
    """
    code = getattr(launch, "__code__", None)
    if code is None:  # the launcher itself, compiled from C: the program has no descriptors
        return launch, []
    if code.co_freevars != _EXPANDS:
        raise AttributeError(f"a launcher refers to {code.co_freevars}")
    found = dict(zip(_EXPANDS, (cell.cell_contents for cell in launch.__closure__), strict=True))
    return found["launcher"], found["tensordesc_meta"]


def _expanded(values: list[Any], descriptions: list[Any], place: int) -> tuple[list[Any], int]:
    """Return the arguments as Triton's launcher takes them, and the new index of the argument at `place`."""
    flat: list[Any] = []
    left, at = iter(descriptions), place
    for index, value in enumerate(values):
        if index == place:
            at = len(flat)
        if hasattr(value, "block_shape"):  # a tensor descriptor
            flat += driver.make_tensordesc_arg(value, next(left))
        else:
            flat.append(value.data_ptr() if isinstance(value, torch.Tensor) else value)
    return flat, at


def _somebody_listens() -> bool:
    """Return whether a hook is set for the beginning or the end of a launch."""
    hooks = knobs.runtime
    return bool(_calls(hooks.launch_enter_hook) or _calls(hooks.launch_exit_hook))


def _calls(hook: Any) -> Any:
    """Return a true value if a hook does something: a plain function, or a chain that is not empty."""
    return hook is not None and getattr(hook, "calls", True)
