"""Findings and evidence in few words."""

from __future__ import annotations

import ast

from megacpp_overlays.model import Evidence, Finding, Verdict
from megacpp_overlays.source import ModuleSource


def at(source: ModuleSource, node: ast.AST, seen: str) -> Evidence:
    """Return evidence with the place of a node."""
    return Evidence(seen=seen, file=source.path, line=getattr(node, "lineno", None))


def broken(shape: str, *seen: Evidence) -> Finding:
    """Return the finding of a recognised shape."""
    return Finding(verdict=Verdict.BROKEN, shape=shape, evidence=seen)


def fixed(*seen: Evidence) -> Finding:
    """Return the finding of upstream's own repair."""
    return Finding(verdict=Verdict.FIXED, shape=None, evidence=seen)


def absent(seen: str) -> Finding:
    """Return the finding where there is nothing to repair."""
    return Finding(verdict=Verdict.ABSENT, shape=None, evidence=(Evidence(seen=seen),))


def unrecognised(*seen: Evidence) -> Finding:
    """Return the finding that installs nothing."""
    return Finding(verdict=Verdict.UNRECOGNISED, shape=None, evidence=seen)
