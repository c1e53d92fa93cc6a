"""Judge findings about mutants: detect wrong verdicts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass

from adversary.bases import Base, Place
from adversary.mutants import Mutant
from adversary.outline import EVERYTHING, Outline, hits
from megacpp_overlays.loader.decide import decide
from megacpp_overlays.loader.probing import examine
from megacpp_overlays.loader.settings import Settings
from megacpp_overlays.model import Decision, Finding, Text, Verdict
from megacpp_overlays.source.trees import ModuleSource, ShippedFile

INSTALLED = "installed on an unrecognised shape"
RETIRED = "FIXED with a changed body"
GONE = "ABSENT though it is only elsewhere"
RAISED = "raised past the boundary"
VIOLATIONS = (INSTALLED, RETIRED, GONE, RAISED)

Known = Mapping[tuple[str, Place], frozenset[tuple[str, ...]]]
"""Bodies in releases, by the name of the part and the place: a mutant may have the body of another release."""
_LINES = 24
"""The number of lines of a diff in a report."""


@dataclass(frozen=True)
class Judgement:
    """The finding about a mutant, and whether it is a violation."""

    base: Base
    where: str
    """The module or file that was changed."""
    mutant: Mutant
    verdict: Verdict | None
    """None where something was raised."""
    milliseconds: float
    """Of one CPU."""
    violation: str | None
    why: str
    is_equal: bool
    """Whether the mutant means the same as the base."""
    tripped: bool
    """Whether the probe raised something that is no `SourceError`; the boundary made UNRECOGNISED of it."""

    def report(self) -> str:
        """Return all facts needed to look into a violation."""
        head = f"{self.violation}: {self.base.name} on {self.base.release}, {self.mutant.kind}, {self.mutant.label}"
        hunk = self.mutant.hunk(self.where).split("\n")
        more = [f"... {len(hunk) - _LINES} more lines"] if len(hunk) > _LINES else []
        return "\n".join([head, self.why, *hunk[:_LINES], *more])


class _ChangedBase:
    """A base with another text in one place."""

    def __init__(self, base: Base, where: str | tuple[str, str], text: str) -> None:
        self._base, self._where, self._text = base, where, text
        self.source: ModuleSource | None = None

    def module(self, name: str) -> ModuleSource | None:
        if name != self._where:
            return self._base.tree.module(name)
        if self.source is None:
            self.source = ModuleSource(name, f"{name.replace('.', '/')}.py", self._text)
        return self.source

    def shipped(self, package: str, path: str) -> ShippedFile | None:
        found = self._base.tree.shipped(package, path)
        return found._replace(text=self._text) if found is not None and (package, path) == self._where else found


def judge(base: Base, where: str | tuple[str, str], mutant: Mutant, known: Known) -> Judgement:
    """Run the probe of a base on a mutant, decide, and name the violation, if there is one.

    Args:
        base: the tree that was mutated, with the finding there.
        where: the module, or the package and the path of a file.
        mutant: its text.
        known: see `Known`.
    """
    tree = _ChangedBase(base, where, mutant.text)
    settings = Settings(enabled=frozenset({base.part.id}))
    began = time.thread_time()
    shown = where if isinstance(where, str) else "/".join(where)
    made = Judgement(base, shown, mutant, None, 0, None, "", is_equal=False, tripped=False)
    try:
        finding = examine(base.part, tree)
        took = (time.thread_time() - began) * 1000
        decision = decide(base.part, settings, finding).decision
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - nothing may come out, whatever its class
        return dataclasses.replace(made, violation=RAISED, why=f"{type(error).__name__}: {error}")
    changed, outline = _changed(mutant, tree.source)
    violation, why = _violation(base, where, mutant, finding, decision, changed, outline, known)
    return dataclasses.replace(
        made,
        verdict=finding.verdict,
        milliseconds=took,
        violation=violation,
        why=why,
        is_equal=not changed,
        tripped="the probe could not read it" in finding.summary(),
    )


def _changed(mutant: Mutant, source: ModuleSource | None) -> tuple[frozenset[str], Outline | None]:
    """Return the names that mean something else in a mutant, and its outline."""
    if mutant.is_harmless or source is None:
        return (frozenset() if mutant.is_harmless else mutant.rebound or frozenset({EVERYTHING})), None
    try:
        parsed = vars(source).get("syntax")
        outline = Outline(mutant.text, parsed)
        return outline.changed(_outline(mutant.before)) | mutant.rebound, outline
    except (SyntaxError, ValueError, RecursionError):
        return frozenset({EVERYTHING}), None


_outlines: dict[str, Outline] = {}


def _outline(text: str) -> Outline:
    if text not in _outlines:
        _outlines.clear()  # mutants of one text come one after the other
        _outlines[text] = Outline(text)
    return _outlines[text]


def _violation(
    base: Base,
    where: str | tuple[str, str],
    mutant: Mutant,
    finding: Finding,
    decision: Decision,
    changed: frozenset[str],
    outline: Outline | None,
    known: Known,
) -> tuple[str | None, str]:
    if finding.verdict is Verdict.FIXED and not isinstance(where, str):
        held = [each.path for each in finding.repair if isinstance(each, Text) and each.path.endswith(where[1])]
        return (RETIRED, f"{held[0]} is not as it was") if held and changed else (None, "")
    if finding.verdict is Verdict.FIXED:
        said = {Place(each.module, each.symbol) for each in finding.repair if not isinstance(each, Text)}
        hit = [each for each in said | base.repair if each.module == where and hits(changed, each.symbol)]
        hit = [each for each in hit if not _as_elsewhere(base, each, mutant, outline, known)]
        return (RETIRED, _said(hit)) if hit else (None, "")
    if decision is Decision.ACTIVE:
        hit = [each for each in base.bodies if each.module == where and hits(changed, each.symbol)]
        seams = base.seams_of(finding.shape)
        if seams < base.seams:  # the probe saw the change, and took a shape that leaves that body to upstream
            hit = [each for each in hit if each in seams]
        hit += [each for each in base.seams if each.module == where and hits(mutant.rebound, each.symbol)]
        hit = [each for each in hit if not _as_elsewhere(base, each, mutant, outline, known)]
        return (INSTALLED, _said(hit)) if hit else (None, "")
    if finding.verdict is Verdict.ABSENT and base.finding.verdict is not Verdict.ABSENT:
        target = base.part.target
        if where == target.module and mutant.kind == "re-export" and hits(mutant.rebound, target.symbol):
            return GONE, f"{target} may be there: {finding.summary()}"
    return None, ""


def _said(hit: list[Place]) -> str:
    return "changed: " + ", ".join(sorted({f"{each.module}:{each.symbol}" for each in hit}))


def _as_elsewhere(base: Base, place: Place, mutant: Mutant, outline: Outline | None, known: Known) -> bool:
    """Return whether a body is word for word that of a release of which the probe says the same."""
    if outline is None or hits(mutant.rebound, place.symbol):
        return False
    return body(outline, place.symbol) in known.get((base.name, place), frozenset())


def body(outline: Outline, symbol: str) -> tuple[str, ...]:
    """Return the code of a definition with its members, without comments, layout and docstrings."""
    return tuple(text for name in outline.within(symbol) for text in outline.said(name))
