"""A probe as the loader asks it: whatever it raises has recognised nothing."""

from __future__ import annotations

from collections.abc import Callable

from megacpp_overlays.loader.probing import unreadable
from megacpp_overlays.model import Finding
from megacpp_overlays.source.trees import SourceTree


def ask(probe: Callable[[SourceTree], Finding], tree: SourceTree) -> Finding:
    """Return the finding of a probe, UNRECOGNISED where it raises."""
    try:
        return probe(tree)
    except Exception as error:  # noqa: BLE001 - as in the loader
        return unreadable(error)
