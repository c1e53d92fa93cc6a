"""Contract of an overlay on code that its probe does not recognise: the condition for placing its seams.

A contract is a quick static check. It says whether a seam can be placed, not whether it is needed. The reproducer, or a kept
witness of it, shows the need. The contract has one clause:

    names    every symbol that the seams of a shape replace is defined once in the target module, as a function or method

A shape that keeps its clauses is a candidate. Overlays of plugins have no reproducer here and therefore no candidates.
"""

from __future__ import annotations

import contextlib
import functools
from typing import NamedTuple

from megacpp_overlays.errors import SourceError
from megacpp_overlays.loader.witnesses import PACKS
from megacpp_overlays.model import Erratum, Reading
from megacpp_overlays.source.readings import ReadingTree
from megacpp_overlays.source.trees import ModuleSource, SourceTree

_OUR_PROBES = "megacpp_overlays.feature_probes."


class Contract(NamedTuple):
    """The shapes whose seams may be placed, and for the other shapes the clause that fails."""

    candidates: tuple[str, ...]
    failed: tuple[str, ...]
    """A sentence for each shape that is not a candidate; it begins with the name of the clause."""


def of(erratum: Erratum, tree: SourceTree) -> Contract:
    """Return the contract of an overlay on a tree; unreadable source fails a clause and raises nothing.

    Args:
        erratum: the declaration; a gate replaces nothing and has no candidates.
        tree: the source tree to read.
    """
    if not erratum.repairs or not has_reproducer(erratum):
        return Contract((), ())
    try:
        source = tree.module(erratum.target.module)
    except SourceError as error:
        return Contract((), (f"names: {error}",))
    if source is None:
        return Contract((), (f"names: there is no {erratum.target.module}",))
    failed = {shape: _missing(source, [each.symbol for each in seams]) for shape, seams in erratum.repairs.items()}
    return Contract(
        tuple(shape for shape, clause in failed.items() if clause is None),
        tuple(dict.fromkeys(clause for clause in failed.values() if clause is not None)),
    )


@functools.cache
def has_reproducer(erratum: Erratum) -> bool:
    """Return whether an overlay or a gate belongs to this package and has a reproducer in it."""
    is_ours = getattr(erratum.probe, "__module__", "").startswith(_OUR_PROBES)
    return is_ours and any(PACKS.glob(f"{erratum.pack:02}-*/reproduce.py"))


def _missing(source: ModuleSource, symbols: list[str]) -> str | None:
    """Return the clause that fails for symbols of a module, or None if each is one plain function."""
    try:
        missing = next((symbol for symbol in symbols if source.defined(symbol) is None), None)
    except SourceError as error:
        return f"names: {error}"
    return None if missing is None else f"names: {source.name} defines no function {missing}"


def readings(erratum: Erratum, tree: ReadingTree) -> tuple[Reading, ...]:
    """Return the definitions of a tree that an overlay depends on, without those that the tree lacks.

    They are the definitions that its probe has asked for, and those that findings of known releases were read from.

    Args:
        erratum: the declaration.
        tree: the tree that its probe has read.
    """
    from megacpp_overlays.loader import known  # noqa: PLC0415 - only unrecognised source needs it

    for module, symbol in known.read_from(erratum):
        with contextlib.suppress(SourceError):  # an unreadable module has no readings
            source = tree.module(module)
            if source is not None:
                source.bindings.definitions(symbol)
    return tree.readings()
