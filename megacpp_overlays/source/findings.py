"""Short constructors for findings and evidence."""

from __future__ import annotations

import ast
from collections.abc import Callable

from megacpp_overlays.errors import SourceError
from megacpp_overlays.model import Evidence, Finding, Verdict
from megacpp_overlays.source.trees import ModuleSource, SourceTree, answer


def at(source: ModuleSource, node: ast.AST, seen: str) -> Evidence:
    """Return evidence with the place of a node."""
    return Evidence(seen=seen, file=source.path, line=getattr(node, "lineno", None))


def broken(shape: str, *seen: Evidence) -> Finding:
    """Return the finding of a recognised shape."""
    return Finding(verdict=Verdict.BROKEN, shape=shape, evidence=seen)


def absent(seen: str, source: ModuleSource | None = None) -> Finding:
    """Return the finding ABSENT, for a tree without code to repair, with the module that was read."""
    where = Evidence(seen=seen, file=source.path if source else None)
    return Finding(verdict=Verdict.ABSENT, shape=None, evidence=(where,))


def unrecognised(*seen: Evidence) -> Finding:
    """Return the finding that installs nothing."""
    return Finding(verdict=Verdict.UNRECOGNISED, shape=None, evidence=seen)


def unknown(source: ModuleSource, node: ast.AST | None, seen: str) -> SourceError:
    """Return the error that a probe raises at code which no known form has; it is the evidence of its finding."""
    return SourceError(seen, file=source.path, line=getattr(node, "lineno", None))


def finding_of(probe: Callable[[SourceTree], Finding], tree: SourceTree) -> Finding:
    """Return the finding of a probe that another one builds on; a SourceError becomes UNRECOGNISED, as in the loader."""
    try:
        return answer(probe, tree)
    except SourceError as error:
        return unrecognised(Evidence(seen=str(error), file=error.file, line=error.line))
