"""Contracts: which shapes may be tried where no probe recognises the code."""

from __future__ import annotations

from megacpp_overlays.loader import contract, registry
from megacpp_overlays.model import Overlay


def test_the_reproducer_of_each_overlay_of_this_package_can_prove_it() -> None:
    """A probe that is no plain function of its module would make one of a plugin of it, which nothing can prove."""
    without = {each.id for each in registry.load() if isinstance(each, Overlay) and not contract.has_reproducer(each)}
    assert not without
