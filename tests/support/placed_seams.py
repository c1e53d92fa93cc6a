"""The seams of an overlay in a module of this process, without the loader, and the module without any."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from upstream_imports import upstream_module

import megacpp_overlays
from megacpp_overlays.loader import live_names, seams
from megacpp_overlays.model import Overlay
from megacpp_overlays.repro import Neighbour, neighbour


@contextlib.contextmanager
def placed(overlay: Overlay, shape: str, module: ModuleType) -> Iterator[None]:
    """Put the seams of a shape in, and take them out again."""
    with contextlib.ExitStack() as undone:
        for each in overlay.replacements[shape]:
            owner, name = live_names.resolve(module, each.symbol)
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


def stock(name: str) -> Any:
    """Return a fixture, to be bound to `module`: a module of upstream without any overlay, for the rest of a file."""

    @pytest.fixture(scope="module", name="module")
    def found() -> Iterator[ModuleType]:
        with without_overlays(name) as module:
            yield module

    return found


def assert_self_test(overlay: Overlay, module: ModuleType, *shapes: str) -> None:
    """Check that the self-test of an overlay sees the defect without seams, before and after, and its absence with those of each shape."""
    assert overlay.self_test(module).broken
    for shape in shapes:
        with placed(overlay, shape, module):
            assert not overlay.self_test(module).broken
    assert overlay.self_test(module).broken


def assert_witness_and_self_test(overlay: Overlay, module: ModuleType, *shapes: str) -> None:
    """Check `assert_self_test`, the same in inference mode and of the witness, and that none of it leaves a trace in the module."""
    import torch

    before = dict(vars(module))
    assert overlay.witness is not None
    assert overlay.witness(module).broken
    assert_self_test(overlay, module, *shapes)
    for shape in shapes:
        with placed(overlay, shape, module), torch.inference_mode():
            assert not overlay.self_test(module).broken
    assert dict(vars(module)) == before


def assert_same_bits(each: Neighbour, overlay: Overlay, module: ModuleType, *shapes: str) -> None:
    """Check that a neighbour is the same without seams and with those of each shape."""
    without = neighbour.measured(each)
    assert not without.failed
    for shape in shapes:
        with placed(overlay, shape, module):
            found = neighbour.measured(each)
        assert neighbour.problem(each, without, found) is None
