"""The packages of locked environments, read where they lie, and edited copies of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from places import ROOT

from megacpp_overlays.source.file_trees import DirectoryTree
from megacpp_overlays.source.trees import ModuleSource, ShippedFile


def tree_of(lane: str) -> DirectoryTree:
    """Return the packages of the environment of a lane; the test is skipped where there is none."""
    found = sorted((ROOT / ".envs" / lane).glob("lib/python3*/site-packages"))
    if not found:
        pytest.skip(f"there is no .envs/{lane}: run `make setup`")
    return DirectoryTree(found[0])


def python_of(lane: str, *, made_by: str = "make setup") -> str:
    """Return the Python of a lane, `current` for this one; the test is skipped where the lane is not set up.

    Args:
        lane: `current`, or a folder of `.envs`.
        made_by: the command that sets it up.
    """
    if lane == "current":
        return sys.executable
    found = ROOT / ".envs" / lane / "bin/python"
    if not found.exists():
        pytest.skip(f"there is no .envs/{lane}: run `{made_by}`")
    return str(found)


class Edited:
    """A tree in which one file has other text, or is not there."""

    def __init__(self, tree: DirectoryTree, path: str, edit: Mapping[str, str] | None) -> None:
        self._tree = tree
        self._path = tree.root / path
        self._edit = edit
        if edit is not None:
            text = self._path.read_text()
            assert all(text.count(old) for old in edit), "the edit changes nothing"

    def module(self, name: str) -> ModuleSource | None:
        found = self._tree.module(name)
        if found is None or Path(found.path) != self._path:
            return found
        return None if self._edit is None else ModuleSource(name, found.path, self._edited(found.text))

    def shipped(self, package: str, path: str) -> ShippedFile | None:
        found = self._tree.shipped(package, path)
        if found is None or Path(found.path) != self._path:
            return found
        return None if self._edit is None else found._replace(text=self._edited(found.text))

    def _edited(self, text: str) -> str:
        for old, new in (self._edit or {}).items():
            text = text.replace(old, new)
        return text
