"""Long texts: a probe answers soon, because it does not walk over the text, and names the size as the reason."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest
from adversary.bases import FEW, Base, base, bases, name_of
from installed import tree_of
from probing import parsed_once
from releases import only

from megacpp_overlays.loader import registry
from megacpp_overlays.loader.probing import examine
from megacpp_overlays.model import Gate, Verdict
from megacpp_overlays.source.trees import ModuleSource, ShippedFile

PARTS = {name_of(each): each for each in registry.load()}
LANES = ("mamba3-pinned", "edge")
SIZE = re.compile(r"has [\d,]+ (characters|words and signs), more than the [\d,]+ that a probe reads")


def five_megabytes(line: str) -> str:
    return line * (5_000_000 // len(line) + 1)


LONGER: dict[str, tuple[Callable[[], str], Callable[[], str]]] = {
    "5 MB of code": (lambda: five_megabytes("value = 1\n"), lambda: five_megabytes("int value = 1;\n")),
    "10,000 branches": (
        lambda: "".join(f"if value == {n}:\n    result = {n}\n" for n in range(10_000)),
        lambda: "".join(f"if (value == {n}) {{ result = {n}; }}\n" for n in range(10_000)),
    ),
}
"""Makers of the text that is appended to a Python module, and of the one for a C++ file."""

EVERY = [(name, kind) for kind in LONGER for name in sorted(PARTS)]
DAILY = [each for number, each in enumerate(EVERY) if number % 18 == 0]
"""One of eighteen combinations, for daily runs: the same guard refuses a long text for every part."""


class Longer:
    """A tree with a text appended to one of its files."""

    def __init__(self, of: Base, where: str | tuple[str, str], more: str) -> None:
        self._tree, self._where, self._more = of.tree, where, more
        self.source: ModuleSource | None = None

    def module(self, name: str) -> ModuleSource | None:
        found = self._tree.module(name)
        if name != self._where:
            return found
        if self.source is None:  # one that no tree at hand has is nothing but long
            self.source = ModuleSource(name, f"{name}.py", f"{found.text if found else ''}\n{self._more}")
        return self.source

    def shipped(self, package: str, path: str) -> ShippedFile | None:
        found = self._tree.shipped(package, path)
        more = f"\n{self._more}" if (package, path) == self._where else ""
        return found and found._replace(text=found.text + more)


ORDER = [Verdict.ABSENT, Verdict.UNRECOGNISED, Verdict.FIXED, Verdict.BROKEN]


@functools.cache
def known(name: str) -> Base:
    """Return a tree that the probe of a part knows as broken, or else as repaired."""
    part = PARTS[name]
    found = [base(part, lane, parsed_once(tree_of(lane).root)) for lane in LANES]
    if not any(each.finding.verdict is Verdict.BROKEN for each in found):
        found += bases([part], FEW)
    return max(found, key=lambda each: ORDER.index(each.finding.verdict))


@pytest.mark.upstream
@pytest.mark.unmeasured
@pytest.mark.parametrize(("name", "kind"), only(EVERY, DAILY))
def test_a_text_that_is_too_long_is_not_recognised_and_the_reason_names_its_size(name: str, kind: str) -> None:
    of, (python, cpp) = known(name), LONGER[kind]
    target = of.part.target.module
    places = [place for place, file in of.tree.files.items() if file is not None] or [target]

    for place in places:
        finding = examine(of.part, Longer(of, place, cpp() if isinstance(place, tuple) else python()))

        if isinstance(of.part, Gate) and finding.verdict in {Verdict.ABSENT, Verdict.FIXED}:
            # Nothing uses the code of this file, or another file has the repair.
            assert not any(str(each).endswith(str(place[1])) for each in finding.repair), (place, finding.summary())
            continue
        if finding.verdict is Verdict.FIXED and all(each.module != place for each in finding.repair):
            continue  # a repair in another module, whatever this one has
        assert finding.verdict is Verdict.UNRECOGNISED, (place, finding.summary())
        assert SIZE.search(finding.summary()), (place, finding.summary())
    for other in [other for other, text in of.tree.texts.items() if text]:
        examine(of.part, tree := Longer(of, other, python()))

        assert tree.source is None or "syntax" not in vars(tree.source), other
