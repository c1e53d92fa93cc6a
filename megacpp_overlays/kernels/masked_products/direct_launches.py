"""Launches of a compiled Triton program without what Triton does for each: a driver takes 3 microseconds, Triton 20.

Triton 3.6 encodes every tensor descriptor again, asks the driver about every pointer, and calls the hooks of profilers that
are not there. Here descriptors and pointers are made into what Triton's launcher takes once. That launcher is Triton's own, so
what a program gets is, too; where it is not made as that of 3.6, or somebody listens, Triton launches.
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
"""Of what the launcher takes before the arguments: grid, stream, function, two flags, two pieces of memory, what the program
needs, and three things for hooks.
"""
_STREAM = 3
_EXPANDS = ("launcher", "tensordesc_indices", "tensordesc_meta")
"""What the function around the launcher of a program with descriptors refers to."""


def directly(compiled: Any, grid: tuple[int, int, int], values: list[Any], place: int) -> Callable[[int], None]:
    """Return what launches a program with another number each time; the arguments have to stay until it was.

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
    """Return Triton's launcher, what it takes, and where the number is there; None where it is made in another way."""
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
