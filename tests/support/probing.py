"""A probe as the loader asks it: whatever it raises has recognised nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.loader.probing import examine
from megacpp_overlays.model import Finding
from megacpp_overlays.source.trees import SourceTree


def ask(probe: Callable[[SourceTree], Finding], tree: SourceTree) -> Finding:
    """Return the finding of a probe, UNRECOGNISED where it raises."""
    declared: Any = SimpleNamespace(probe=probe)
    return examine(declared, tree)
