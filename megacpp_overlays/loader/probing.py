"""Runs of probes on the installed source: the boundary that turns any exception into UNRECOGNISED, and the resulting records.

An overlay is assessed when its target has been imported. A gate needs no import of its target: it is decided from source when
torch is imported, so that the warning comes before the first compile of a run. If none of its packages is installed, that costs
one search for a folder. A gate installs nothing, and may depend on the GPUs of a host, so gates are left out of the comparison
of ranks and children.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from megacpp_overlays.errors import SourceError
from megacpp_overlays.frozen import replace
from megacpp_overlays.loader.decide import decide
from megacpp_overlays.loader.settings import Settings
from megacpp_overlays.model import Body, Decision, Erratum, Evidence, Finding, Gate, Overlay, Proof, Record, Verdict
from megacpp_overlays.source.trees import SourceTree, answer, readable

if TYPE_CHECKING:
    from megacpp_overlays.source.readings import ReadingTree

_SPOKEN_OF = frozenset({Verdict.BROKEN, Verdict.UNRECOGNISED})
"""Verdicts of a gate that are reported on a host that is concerned, and replaced by ABSENT on one that is not."""


def examine(erratum: Erratum, tree: SourceTree, *, unless: tuple[type[Exception], ...] = ()) -> Finding:
    """Run the probe of an overlay or a gate. A probe that raises has not recognised the source.

    Args:
        erratum: the declaration.
        tree: the source tree to read.
        unless: exceptions that are raised, because they say nothing about the source, such as a tree that cannot be opened.
    """
    if isinstance(erratum, Gate):  # a gate replaces nothing, so its readings are not compared with the process
        return _asked(erratum, tree, unless)
    from megacpp_overlays.source.readings import ReadingTree  # noqa: PLC0415 - not needed to arm

    return _examined(erratum, ReadingTree(tree), unless)


def _examined(erratum: Erratum, tree: ReadingTree, unless: tuple[type[Exception], ...]) -> Finding:
    """Run a probe over a tree that records the definitions it reads, and add them to a finding that depends on them."""
    found = _asked(erratum, tree, unless)
    return replace(found, read=tree.readings()) if _rests_on_code(found) else found


def _asked(erratum: Erratum, tree: SourceTree, unless: tuple[type[Exception], ...]) -> Finding:
    try:
        return answer(erratum.probe, tree)
    except unless:
        raise
    except Exception as error:  # noqa: BLE001 - any exception of a probe means a shape that it does not know
        return _unreadable(error)


def _rests_on_code(finding: Finding) -> bool:
    """Return whether a finding leads to a decision about the code that was read, so that this code has to be the code that runs."""
    return finding.verdict in {Verdict.BROKEN, Verdict.FIXED} or finding.looks_repaired


def _unreadable(error: Exception) -> Finding:
    """Return the finding of a probe that raised; a `SourceError` is itself the evidence."""
    seen = Evidence(seen=f"the probe could not read it: {type(error).__name__}: {error}")
    if isinstance(error, RecursionError):
        seen = Evidence(seen="its code is nested too deeply for the probe to read it")
    if isinstance(error, SourceError):
        seen = Evidence(seen=str(error), file=error.file, line=error.line)
    return Finding(verdict=Verdict.UNRECOGNISED, shape=None, evidence=(seen,))


def examine_installed(
    erratum: Erratum, tree: SourceTree, settings: Settings, *, unless: tuple[type[Exception], ...] = ()
) -> Finding:
    """Run a probe on the installed source; for UNRECOGNISED source use the verdict of a kept witness, or a learned one.

    The finding of a gate is ABSENT if this host is not concerned.

    Args:
        erratum: the declaration.
        tree: an `InstalledTree`.
        settings: name the folder of witnesses.
        unless: exceptions that are raised; see `examine`.
    """
    if isinstance(erratum, Gate):
        finding = examine(erratum, tree, unless=unless)
        if finding.verdict in _SPOKEN_OF and (why := _elsewhere(erratum)):
            return Finding(verdict=Verdict.ABSENT, shape=None, evidence=(*finding.evidence, Evidence(seen=why)))
        is_known = finding.verdict is not Verdict.UNRECOGNISED
        return finding if is_known else _witnessed(erratum, finding, tree, settings)
    from megacpp_overlays.source.readings import ReadingTree  # noqa: PLC0415 - not needed to arm

    reading = ReadingTree(tree)
    finding = unless_published(erratum, _examined(erratum, reading, unless), tree)
    if finding.verdict is not Verdict.UNRECOGNISED:
        return finding
    from megacpp_overlays.loader import contract  # noqa: PLC0415 - a launch that recognises all pays nothing

    found = contract.of(erratum, tree)
    if found.candidates:
        read = finding.read or contract.readings(erratum, reading)
        finding = replace(finding, candidates=found.candidates, read=read)
    elif not finding.looks_repaired:
        return replace(finding, evidence=(*finding.evidence, *map(Evidence, found.failed)))
    return _witnessed(erratum, finding, tree, settings)


def examine_to_measure(erratum: Erratum, tree: SourceTree, settings: Settings) -> Finding:
    """Return the finding for the installed source; for a repair in no published release, return the finding of the probe.

    For commands that run the reproducer on this tree, which shows whether the repair works there.
    """
    is_gate = isinstance(erratum, Gate)
    found = examine_installed(erratum, tree, settings) if is_gate else known_or_examined(erratum, tree, settings)
    return examine(erratum, tree) if found.unpublished else found


def unless_published(erratum: Erratum, finding: Finding, tree: SourceTree) -> Finding:
    """Return a finding; in a tree that is no published release, replace FIXED by reading with UNRECOGNISED that looks repaired.

    In such a tree an edit of a caller, a flag or a configuration that no probe reads may bypass the repair. Only a reproducer can
    show that, and this package has reproducers for its own overlays alone, so others keep their finding.

    Args:
        erratum: the declaration.
        finding: of its probe.
        tree: an `InstalledTree`.
    """
    if finding.verdict is not Verdict.FIXED or finding.proof is not Proof.READ:
        return finding
    from megacpp_overlays.loader import contract, learned  # noqa: PLC0415 - a launch without a repair pays nothing
    from megacpp_overlays.source import published  # noqa: PLC0415 - the same

    if not contract.has_reproducer(erratum):
        return finding
    try:
        release = published.release_of(erratum.target, tree)
        if release is not None and not learned.is_doubted(erratum, release):
            return finding
    except OSError as error:
        finding = replace(finding, evidence=(*finding.evidence, Evidence(f"{error.filename}: {error.strerror}")))
    return replace(finding, verdict=Verdict.UNRECOGNISED, proof=None, looks_repaired=True, unpublished=True)


def _witnessed(erratum: Erratum, finding: Finding, tree: SourceTree, settings: Settings) -> Finding:
    from megacpp_overlays.loader import learned, witnesses  # noqa: PLC0415 - a launch that recognises all pays nothing

    found = witnesses.proved(erratum, finding, tree, settings)
    return learned.finding(erratum, found, tree) if found.verdict is Verdict.UNRECOGNISED else found


def _elsewhere(gate: Gate) -> str | None:
    """Return the reason why this host is not concerned; None if it is, or if the check raises."""
    try:
        return gate.elsewhere() if gate.elsewhere else None
    except Exception:  # noqa: BLE001 - a check that fails must not suppress the warning
        return None


def known_or_examined(erratum: Erratum, tree: SourceTree, settings: Settings) -> Finding:
    """Return the recorded finding for the installed texts; if there is none, run the probe.

    Raises:
        MemoryError: it says nothing about the source.
    """
    from megacpp_overlays.loader import known  # noqa: PLC0415 - gates are decided without it, which saves time at arming

    found = known.finding(erratum, tree)
    if found is not None and not unless_published(erratum, found, tree).unpublished:
        return found
    return examine_installed(erratum, tree, settings, unless=(MemoryError,))


def assess_overlay(overlay: Overlay, module: ModuleType, settings: Settings, tree: SourceTree) -> Record:
    """Probe a loaded target and decide. `active` in the result is an order that `install` carries out."""
    from megacpp_overlays.source import distributions  # noqa: PLC0415 - 28 ms that arming need not spend

    finding = known_or_examined(overlay, tree, settings)
    return replace(
        held_against_the_process(decide(overlay, settings, finding), tree, module),
        version=distributions.describe(overlay.target.distribution, getattr(module, "__file__", None)),
        source_sha256=_source_sha256(overlay, tree),
    )


def held_against_the_process(record: Record, tree: SourceTree, module: ModuleType | None = None) -> Record:
    """Return a record unchanged, or as CONFLICT if other code is loaded than the code that its finding was read from.

    Args:
        record: any record; only active and retired ones are checked.
        tree: the source tree of upstream's repair.
        module: the target of an overlay, fully executed; for a retired overlay its witness runs, too.
    """
    if record.decision is Decision.RETIRED and (other := _in_place_of_the_repair(record, tree, module)):
        return replace(record, decision=Decision.CONFLICT, reason=other)
    return held_against_its_readings(record)


def held_against_its_readings(record: Record) -> Record:
    """Return a record unchanged, or as CONFLICT if a definition that its finding was read from is foreign code here.

    The symbols of an active overlay's own seams are skipped, because other checks cover them. It compiles nothing.
    """
    if record.decision not in _RESTS_ON_READINGS or record.finding is None or not record.finding.read:
        return record
    from megacpp_overlays.loader import foreign  # noqa: PLC0415 - not needed to arm

    found = foreign.foreign_definitions(record.finding, but=_seam_symbols(record))
    if not found:
        return record
    names = tuple(f"{each.name}: {each.identity}" for each in found)
    return replace(record, decision=Decision.CONFLICT, reason="; ".join(map(str, found)), around=names)


_RESTS_ON_READINGS = frozenset({Decision.ACTIVE, Decision.RETIRED})


def _seam_symbols(record: Record) -> list[str]:
    """Return the qualified names that an active overlay replaces."""
    overlay = record.overlay
    replacements = overlay.repairs.get(record.shape, ()) if record.decision is Decision.ACTIVE else ()
    return [f"{overlay.target.module}.{each.symbol}" for each in replacements]


def _in_place_of_the_repair(record: Record, tree: SourceTree, module: ModuleType | None) -> str | None:
    """Return a sentence on the code that is loaded in place of a repair that was read, or None if the repair is loaded."""
    finding, loaded = record.finding, sys.modules
    if finding is None:
        return None
    if module is None and not any(isinstance(each, Body) and each.module in loaded for each in finding.repair):
        return None
    from megacpp_overlays.loader import live  # noqa: PLC0415 - a launch without a repair pays nothing

    # The verdict of a reproducer, which runs the callers, has precedence over the witness, which runs the target alone.
    asked = module if finding.proof is Proof.READ else None
    try:
        return live.difference(finding, tree, module) or (live.misbehaviour(record.overlay, asked) if asked else None)
    except Exception as error:  # noqa: BLE001 - code that cannot be compared is not known to be repaired
        return f"the loaded code could not be compared with the source that was read: {type(error).__name__}: {error}"


def assess_gate(gate: Gate, settings: Settings, tree: SourceTree) -> Record:
    """Probe the installed source and decide; it raises nothing. Only a warning or a conflict has versions."""
    record = held_against_the_process(decide(gate, settings, examine_installed(gate, tree, settings)), tree)
    if record.decision is not Decision.ABSENT:
        record = replace(record, source_sha256=_source_sha256(gate, tree))
    if record.decision in {Decision.GATED, Decision.CONFLICT}:
        record = replace(record, version=versions(gate))
    return record


def versions(gate: Erratum) -> str | None:
    """Return the versions of the combination, such as `2.3.2.post1 with tilelang 0.1.15`; None if the target is not installed."""
    from megacpp_overlays.source import distributions  # noqa: PLC0415 - see above

    own = distributions.version(gate.target.distribution)
    others = [f"{name} {found}" for name in gate.companions if (found := distributions.version(name))]
    if own is None:
        return None
    return " with ".join([own, *([" and ".join(others)] if others else [])])


def _source_sha256(erratum: Erratum, tree: SourceTree) -> str | None:
    source = readable(tree, erratum.target.module)
    return source.sha256 if source else None
