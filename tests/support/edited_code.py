"""Released or installed upstream code, and the same code with one edit, as a probe reads it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import ModuleType

import pytest
from installed import tree_of
from places import WHEELS
from probing import ParsedOnce, Texts, ask, parsed_once

from megacpp_overlays.model import Finding
from megacpp_overlays.source.trees import SourceTree

Edit = tuple[str, str] | tuple[str, str, str] | Callable[[str], str]
"""Old and new text of the target, or module, old and new text; or a function of the text of the target.

A file that is no module is named `package:path`.
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """Upstream code that a probe reads, and edits of it by name.

    The code is that of `tree`, but for modules and files that `texts` has other text for.
    """

    feature: ModuleType
    target: str
    texts: Callable[[], Mapping[str, str | None]] = dict
    edits: Mapping[str, Edit] = dataclasses.field(default_factory=dict)
    probe: str = "probe"
    tree: Callable[[], SourceTree | None] = lambda: None

    @property
    def overlay(self) -> str:
        """Return the id of the overlay that the probe is for."""
        return self.feature.__name__.rpartition(".")[2].replace("_", "-")

    def ask(self, texts: Mapping[str, str | None]) -> Finding:
        return ask(getattr(self.feature, self.probe), Texts(texts, self.tree()))

    def edited(self, edit: Edit) -> dict[str, str | None]:
        """Return `texts` with an edit applied; the first place that has the old text is changed."""
        name, change = self.target, edit
        if isinstance(change, tuple) and len(change) == 3:
            name, change = change[0], change[1:]
        before = self._text(name)
        after = change(before) if callable(change) else replaced(before, *change)
        assert after != before
        return {**self.texts(), name: after}

    def _text(self, name: str) -> str:
        tree = Texts(self.texts(), self.tree())
        package, _, path = name.partition(":")
        found = tree.shipped(package, path) if path else tree.module(name)
        assert found is not None
        return found.text


def replaced(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


def appended(code: str) -> Callable[[str], str]:
    """Return an edit that adds code at the end."""
    return lambda text: f"{text}\n\n{code}\n"


@functools.cache
def archive(prefix: str) -> ParsedOnce:
    """Return the tree of a kept wheel; the test is skipped where there is none."""
    found = sorted(WHEELS.glob(f"{prefix}*"))
    if not found:
        pytest.skip(f"no {prefix} in {WHEELS}")
    return parsed_once(found[0])


def of_release(prefix: str) -> Callable[[], ParsedOnce]:
    return lambda: archive(prefix)


def of_lane(lane: str) -> Callable[[], ParsedOnce]:
    return lambda: parsed_once(tree_of(lane).root)


@functools.cache
def released(prefix: str, module: str) -> str:
    source = archive(prefix).module(module)
    assert source is not None
    return source.text


def edited_release(module: str, old: str, new: str, *, release: str = "0.19.2") -> Texts:
    """Return a release of megatron-core in which the first place with a text of one module was changed."""
    prefix = f"megatron_core-{release}"
    return Texts({module: replaced(released(prefix, module), old, new)}, archive(prefix))
