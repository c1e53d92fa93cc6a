"""Findings and evidence in few words."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from megacpp_overlays.errors import SourceError
from megacpp_overlays.model import Body, Evidence, Finding, Proof, Text, Verdict
from megacpp_overlays.source.trees import ModuleSource, SourceTree, answer


def at(source: ModuleSource, node: ast.AST, seen: str) -> Evidence:
    """Return evidence with the place of a node."""
    return Evidence(seen=seen, file=source.path, line=getattr(node, "lineno", None))


def conclusion(verdict: Verdict, shape: str | None, *seen: Evidence) -> Finding:
    """Return the finding of a verdict, a shape where it is BROKEN, and what was seen."""
    return Finding(verdict=verdict, shape=shape, evidence=seen)


def broken(shape: str, *seen: Evidence) -> Finding:
    """Return the finding of a recognised shape."""
    return conclusion(Verdict.BROKEN, shape, *seen)


def fixed(*seen: Evidence, repair: Sequence[Body | Text]) -> Finding:
    """Return the finding of upstream's own repair, all of which was read."""
    return Finding(verdict=Verdict.FIXED, shape=None, evidence=seen, repair=tuple(repair), proof=Proof.READ)


def looks_repaired(*seen: Evidence, repair: Sequence[Body | Text]) -> Finding:
    """Return the finding of what has the structure of a repair, and of which nobody read all."""
    return Finding(verdict=Verdict.UNRECOGNISED, shape=None, evidence=seen, repair=tuple(repair), looks_repaired=True)


def absent(seen: str, source: ModuleSource | None = None) -> Finding:
    """Return the finding where there is nothing to repair, with the module that was looked at."""
    return conclusion(Verdict.ABSENT, None, Evidence(seen=seen, file=source.path if source else None))


def unrecognised(*seen: Evidence) -> Finding:
    """Return the finding that installs nothing."""
    return conclusion(Verdict.UNRECOGNISED, None, *seen)


def unknown(source: ModuleSource, node: ast.AST | None, seen: str) -> SourceError:
    """Return the error that a probe raises at something which no known form has; it is the evidence of its finding."""
    return SourceError(seen, file=source.path, line=getattr(node, "lineno", None))


def finding_of(probe: Callable[[SourceTree], Finding], tree: SourceTree) -> Finding:
    """Return the finding of a probe that another one builds on, and which says in its own words why it matters.

    Probes raise and leave it to the loader to turn that into UNRECOGNISED; this is for one that asks another.
    """
    try:
        return answer(probe, tree)
    except SourceError as error:
        return unrecognised(Evidence(seen=str(error), file=error.file, line=error.line))
