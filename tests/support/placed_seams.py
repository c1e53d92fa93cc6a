"""The seams of an overlay in a module of this process, without the loader, and the module without any."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType

from upstream_imports import upstream_module

import megacpp_overlays
from megacpp_overlays.loader import seams
from megacpp_overlays.model import Overlay


@contextlib.contextmanager
def placed(overlay: Overlay, shape: str, module: ModuleType) -> Iterator[None]:
    """Put the seams of a shape in, and take them out again."""
    with contextlib.ExitStack() as undone:
        for each in overlay.replacements[shape]:
            owner, name = seams.resolve(module, each.symbol)
            seam = seams.replace(owner, name, lambda f, make=each.make: make(f, module), overlay_id=overlay.id)
            undone.callback(seam.undo)
        yield


@contextlib.contextmanager
def overlays_out() -> Iterator[None]:
    """Take the overlays of this process out until the end."""
    megacpp_overlays.undo()
    try:
        yield
    finally:
        megacpp_overlays.arm()


@contextlib.contextmanager
def without_overlays(name: str) -> Iterator[ModuleType]:
    """Import a module of upstream, and take the overlays of this process out until the end."""
    found = upstream_module(name)
    with overlays_out():
        yield found
