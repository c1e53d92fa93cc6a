"""Launches of a compiled Triton program without Triton's work for each launch: a driver takes 3 microseconds, Triton 20.

Triton 3.6 encodes every tensor descriptor again, asks the driver about every pointer, and calls the hooks of profilers even
if there are none. Here descriptors and pointers are converted to the arguments of Triton's launcher once. The launcher is
Triton's own, so the program gets the same arguments. If it is not built like the one of 3.6, or a hook is set, Triton launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

try:
    from triton import knobs
    from triton.backends.nvidia import driver
    from triton.runtime import driver as runtime
except ImportError:  # an older one
    driver = None

_LAYOUT = "iiiKKppOOOOOO"
"""Of the launcher's parameters before the arguments: grid, stream, function, two flags, two pieces of memory, the program's
metadata, and three objects for hooks.
"""
_STREAM = 3
_EXPANDS = ("launcher", "tensordesc_indices", "tensordesc_meta")
"""Free variables of the function around the launcher of a program with descriptors."""


def directly(compiled: Any, grid: tuple[int, int, int], values: list[Any], place: int) -> Callable[[int], None]:
    """Return a function that launches a program with a new number each time; its arguments have to live until the last launch.

    Args:
        compiled: a program of Triton.
        grid: how many of it run.
        values: its arguments; `values` itself changes.
        place: of the number among them.
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
    """Return Triton's launcher, its arguments, and the index of the number in them; None if the launcher is built differently."""
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
    """Return the launcher itself, and how each of its descriptors is encoded.

    Raises:
        AttributeError: this is no launcher as it was read.
    """
    code = getattr(launch, "__code__", None)
    if code is None:  # compiled from C, and so the launcher itself
        return launch, []
    if code.co_freevars != _EXPANDS:
        raise AttributeError(f"a launcher refers to {code.co_freevars}")
    found = dict(zip(_EXPANDS, (cell.cell_contents for cell in launch.__closure__), strict=True))
    return found["launcher"], found["tensordesc_meta"]


def _expanded(values: list[Any], descriptions: list[Any], place: int) -> tuple[list[Any], int]:
    """Return arguments as Triton's launcher takes them, and where the one from `place` is."""
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
    hooks = knobs.runtime
    return bool(_calls(hooks.launch_enter_hook) or _calls(hooks.launch_exit_hook))


def _calls(hook: Any) -> Any:
    return hook is not None and getattr(hook, "calls", True)
