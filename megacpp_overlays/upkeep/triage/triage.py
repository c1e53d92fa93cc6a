"""A triage of an upgrade: facts from both locks, their environments and the packs, judged by `outcomes`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from megacpp_overlays.errors import LockError, UpkeepError
from megacpp_overlays.model import Erratum, Verdict
from megacpp_overlays.repro import inventory
from megacpp_overlays.repro.case import PackError
from megacpp_overlays.repro.progress import Progress
from megacpp_overlays.upkeep import evidence, ledger
from megacpp_overlays.upkeep.environments import Environment
from megacpp_overlays.upkeep.evidence import CaseResult, PartDecision, ProbeReport
from megacpp_overlays.upkeep.locks import Lock
from megacpp_overlays.upkeep.triage.facts import Facts
from megacpp_overlays.upkeep.triage.outcomes import Ruling, judge


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionChange:
    """A distribution whose version differs between the locks."""

    distribution: str
    before: str | None
    """The version before; None where the distribution was added."""
    after: str | None
    """The version after; None where the distribution was removed."""
    is_target: bool
    """Whether the distribution is the target of an overlay."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OverlayTriage:
    """The outcome of one overlay, with all facts that it was judged by."""

    overlay: Erratum
    """The first of its parts."""
    facts: Facts
    ruling: Ruling


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of running reproducers."""

    packs: Path
    timeout: float = evidence.TIMEOUT
    """Seconds for one process; a case has two."""
    progress: Callable[[str], object] = lambda line: None
    """Receives a line for each step."""


def changes(before: Lock, after: Lock, overlays: Collection[Erratum]) -> tuple[VersionChange, ...]:
    """Return the distributions whose versions differ between two locks, targets of overlays first.

    Raises:
        LockError: the locks pin the same versions.
    """
    targets = {canonicalize_name(overlay.target.distribution) for overlay in overlays}
    found = [
        VersionChange(distribution=name, before=old, after=new, is_target=name in targets)
        for name in sorted({*before.pins, *after.pins})
        if (old := before.version(name)) != (new := after.version(name))
    ]
    if not found:
        raise LockError(f"{before.path} and {after.path} pin the same versions: there is no upgrade to triage")
    return tuple(sorted(found, key=lambda each: not each.is_target))


def triage(
    before: Environment, after: Environment, overlays: Sequence[Erratum], how: RunOptions
) -> tuple[OverlayTriage, ...]:
    """Triage overlays for an upgrade; this takes minutes, because their reproducers run.

    Args:
        before: the environment before the upgrade; it is only probed.
        after: the environment after the upgrade; it is probed, every target is imported if one is broken, and the reproducers run.
        overlays: the declarations, in parts.
        how: the options of the reproducers.

    Raises:
        UpkeepError: this package does not run in one of the environments, or knows other overlays there.
        ManifestError: the manifest of the packs cannot be read.
    """
    firsts = {id: parts[0] for id, parts in ledger.by_id(overlays).items()}
    here = _probe(before, firsts, how)
    there = _with_witnesses(after, _probe(after, firsts, how), firsts, how)
    decided = _pre_flight(after, how) if any(there[id].verdict is Verdict.BROKEN for id in firsts) else "not asked"
    triaged = []
    progress = Progress(len(firsts))
    for id, overlay in firsts.items():
        parts = decided if isinstance(decided, str) else decided.get(id, ())
        facts = _facts((before, after), overlay, here[id], there[id], parts, how)
        triaged.append(OverlayTriage(overlay=overlay, facts=facts, ruling=judge(facts)))
        how.progress(progress.done(f"{id}: {triaged[-1].ruling.outcome.value}"))
    return tuple(triaged)


def _probe(environment: Environment, ids: Collection[str], how: RunOptions) -> Mapping[str, ProbeReport]:
    how.progress(f"{environment.lock.path}: probing")
    return evidence.probe_all(environment, ids)


def _with_witnesses(
    environment: Environment, probed: Mapping[str, ProbeReport], ids: Collection[str], how: RunOptions
) -> Mapping[str, ProbeReport]:
    """Run the reproducers of overlays that look repaired, and return new reports with the reasons of failed proofs."""
    looking = [id for id in ids if any(part.looks_repaired for part in probed[id].parts)]
    if not looking:
        return probed
    how.progress(f"{environment.lock.path}: proving parts that look repaired: {', '.join(looking)}")
    unproved = evidence.witness(environment, how.packs, looking, how.timeout)
    found = _probe(environment, ids, how)
    return {id: report.with_reasons(unproved) for id, report in found.items()}


def _pre_flight(environment: Environment, how: RunOptions) -> Mapping[str, tuple[PartDecision, ...]] | str:
    how.progress(f"{environment.lock.path}: importing every target")
    try:
        return evidence.pre_flight(environment)
    except UpkeepError as error:
        return str(error)


def _facts(
    environments: tuple[Environment, Environment],
    overlay: Erratum,
    before: ProbeReport,
    after: ProbeReport,
    decided: tuple[PartDecision, ...] | str,
    how: RunOptions,
) -> Facts:
    environment = environments[1]
    ran: tuple[CaseResult, ...] | str
    kept: tuple[evidence.KeptReceipt, ...] = ()
    if after.verdict is Verdict.ABSENT and (before.verdict is Verdict.ABSENT or not any(after.versions.values())):
        ran = "there is no target to run it on"
    else:
        try:
            pack = inventory.find(how.packs, overlay.pack)
            ran = evidence.reproduce(environment, pack, overlay.id, timeout=how.timeout, progress=how.progress)
            kept = evidence.receipts_for(after, pack, environment.lock)
        except PackError as error:
            ran = str(error)
    return Facts(
        pack=overlay.pack,
        locks=(str(environments[0].lock.path), str(environment.lock.path)),
        before=before,
        after=after,
        decided=decided,
        ran=ran,
        kept=kept,
    )
