"""Prove what only looks repaired: its reproducer measures upstream alone, and what it shows is kept for the loader.

Every case that is about a part, and that this host can run, has to see no defect. A case that sees it is the answer, and
one that cannot run or fails is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megacpp_overlays.loader import witnesses
from megacpp_overlays.loader.probing import examine, examine_installed
from megacpp_overlays.loader.settings import Settings
from megacpp_overlays.model import Erratum, Finding, Proof, Verdict
from megacpp_overlays.repro import inventory, runner, stamp
from megacpp_overlays.repro.case import Case, PackError
from megacpp_overlays.repro.judge import Conclusion, Part, Sentinel
from megacpp_overlays.repro.transcript import Transcript
from megacpp_overlays.source import distributions
from megacpp_overlays.source.trees import InstalledTree, Remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessOptions:
    """How to run reproducers."""

    packs: Path
    settings: Settings
    """Of this process: where witnesses are kept."""
    timeout: float = 900.0
    """Seconds for one case."""
    progress: Callable[[str], None] = lambda line: None
    """Gets a line for each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What became of one part of an overlay."""

    overlay: str
    target: str
    """Its module."""
    proved: bool
    reason: str
    """What was measured, or why that is no proof."""
    cases: tuple[tuple[str, str], ...] = ()
    """Each case that was tried, with the word for what it showed."""


class _Ran(NamedTuple):
    case: Case
    conclusion: Conclusion
    parts: tuple[Part, ...]


def unproved(overlays: Sequence[Erratum], settings: Settings) -> tuple[Erratum, ...]:
    """Return the parts that look repaired here, and of which no kept witness counts."""
    tree = Remembered(InstalledTree())
    return tuple(part for part in overlays if examine_installed(part, tree, settings).looks_repaired)


def prove(overlays: Sequence[Erratum], parts: Sequence[Erratum], how: WitnessOptions) -> Iterator[Attempt]:
    """Run the cases of parts that look repaired, keep a witness of each that they prove, and say what became of it.

    Args:
        overlays: every declaration of this process, in parts.
        parts: those that look repaired.
        how: how to run reproducers.
    """
    for overlay_id in dict.fromkeys(part.id for part in parts):
        chosen = [part for part in parts if part.id == overlay_id]
        try:
            pack = inventory.find(how.packs, chosen[0].pack)
            ran = _run(pack, overlays, chosen, how)
        except PackError as error:
            yield from (_failed(part, str(error)) for part in chosen)
            continue
        yield from (_concluded(part, pack.reproducer, ran, how) for part in chosen)


def _run(
    pack: inventory.Pack, overlays: Sequence[Erratum], parts: Sequence[Erratum], how: WitnessOptions
) -> list[_Ran]:
    cases = [
        case
        for case in inventory.load_cases(pack.reproducer)
        if case.overlay == parts[0].id and set(inventory.parts_of(case, overlays)) & set(parts)
    ]
    transcript = Transcript([], how.progress)
    ran = []
    for case in cases:
        job = runner.Job(
            reproducer=pack.reproducer, cases=(case,), overlays=tuple(overlays), command="", timeout=how.timeout
        )
        ran.append(_Ran(case, *runner.witness_case(job, case, transcript)))
    return ran


def _concluded(part: Erratum, reproducer: Path, ran: Sequence[_Ran], how: WitnessOptions) -> Attempt:
    """Return what the cases show of a part, and keep it where that is a proof."""
    module = part.target.module
    about = [each for each in ran if not each.case.targets or module in each.case.targets]
    cases = tuple((each.case.name, each.case.word(each.conclusion.sentinel)) for each in about)
    if not about:
        return _failed(part, "its pack has no case for it")
    for sentinel, what in ((Sentinel.BUG_REPRODUCED, "it shows the defect"), (Sentinel.FAILED, "it failed")):
        for each in about:
            if each.conclusion.sentinel is sentinel:
                witnesses.forget(witnesses.path_of(part, how.settings))
                return _failed(part, f"case {each.case.name}: {what}: {each.conclusion.reason}", cases)
    sound = [each for each in about if each.conclusion.sentinel is Sentinel.BUG_NOT_PRESENT]
    if not sound:
        why = "; ".join(f"case {each.case.name}: {each.conclusion.reason}" for each in about)
        return _failed(part, f"no case can run here: {why}", cases)
    sources: dict[str, str | None] = {}
    for each in sound:
        read = next((found.sources for found in each.parts if found.module == module), None)
        if read is None or any(sources.get(name, sha256) != sha256 for name, sha256 in read.items()):
            return _failed(part, f"case {each.case.name}: another source was read than looks repaired", cases)
        sources |= read
    names = {name for each in sound for name in each.case.versions} | {part.target.distribution, *part.companions}
    path = witnesses.path_of(part, how.settings)
    taken = stamp.take(reproducer, [each.case for each in sound], [part.target], None)
    data = witnesses.content(
        part,
        sources=sources,
        versions={name: distributions.version(name) for name in names},
        reproducer=reproducer,
        cases=[{"case": each.case.name, "device": each.case.device, "seen": each.conclusion.reason} for each in sound],
        host=taken.host,
        date=taken.date,
    )
    try:
        witnesses.keep(path, data)
    except OSError as error:
        return _failed(part, f"it was shown and cannot be kept: {error.filename}: {error.strerror}", cases)
    finding = examine_installed(part, Remembered(InstalledTree()), how.settings)
    if finding.proof is not Proof.WITNESSED:
        return _failed(part, f"it was shown, and does not hold any more: {finding.evidence[-1]}", cases)
    return Attempt(overlay=part.id, target=module, proved=True, reason=str(finding.evidence[-1]), cases=cases)


def _failed(part: Erratum, reason: str, cases: tuple[tuple[str, str], ...] = ()) -> Attempt:
    return Attempt(overlay=part.id, target=part.target.module, proved=False, reason=reason, cases=cases)


def nothing_to_prove(part: Erratum, finding: Finding) -> Attempt:
    """Return the answer for a part that was asked for and does not look repaired."""
    needs_none = finding.verdict in {Verdict.FIXED, Verdict.ABSENT}
    what = "there is nothing to prove" if needs_none else "it does not look repaired"
    reason = f"{what}: the probe says {finding.verdict.value}: {finding.summary()}"
    return Attempt(overlay=part.id, target=part.target.module, proved=needs_none, reason=reason)


def asked_for(overlays: Sequence[Erratum], ids: Sequence[str], how: WitnessOptions) -> tuple[Attempt, ...]:
    """Prove anew what looks repaired of the overlays with these ids; of the others say why there is nothing to prove."""
    tree = Remembered(InstalledTree())
    found: list[Attempt] = []
    for overlay_id in dict.fromkeys(ids):
        findings = {part: examine(part, tree) for part in overlays if part.id == overlay_id}
        looking = [part for part, finding in findings.items() if finding.looks_repaired]
        found += prove(overlays, looking, how)
        others = [nothing_to_prove(part, each) for part, each in findings.items() if part not in looking]
        found += [] if looking else others
    return tuple(found)
