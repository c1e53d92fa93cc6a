"""Evidence from an environment: the findings of the probes, the decisions of the loader, the results of the reproducers.

A kept receipt of the same versions counts as well, because a case that this host cannot run may have run elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from packaging.version import InvalidVersion, Version

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.model import Decision, Verdict
from megacpp_overlays.repro import inventory, manifest
from megacpp_overlays.repro.case import Case
from megacpp_overlays.repro.judge import Conclusion, Sentinel, meaning, verdict_of
from megacpp_overlays.upkeep import other_python
from megacpp_overlays.upkeep.environments import Environment
from megacpp_overlays.upkeep.locks import Lock

TIMEOUT = 900.0
"""Seconds for one process of a reproducer."""
_LOOK = 300.0
"""Time limit in seconds of a process that measures nothing: probing, or importing every target."""
_MOST_CASES = 8
"""Number of cases per overlay that the time limit of `witness` allows for."""
_MARGIN = 60.0
"""Seconds allowed for the runner in addition to the two processes of a case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedPart:
    """The finding of the probe of one part of an overlay."""

    module: str
    target: str
    """The target, including the symbol in the module."""
    distribution: str
    version: str | None
    """Version of the distribution; None where it is not installed."""
    verdict: Verdict
    shape: str | None
    evidence: str
    has_seams: bool
    """Whether the overlay declares seams for the shape; for a gate, whether it declares advice."""
    gate: bool = False
    """Whether this is a gate, which installs nothing."""
    opt_in: bool = False
    """Whether the overlay is off by default; its reproducer switches it on."""
    beside: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    """Versions of the other distributions that a gate concerns."""
    left_alone: str | None
    """The declared reason for having no seams, where there is one."""
    looks_repaired: bool = False
    """Whether the code has the structure of a repair that no person has read, with no valid witness of it."""
    can_be_proved: bool = False
    """Whether the code is not recognised and `megacpp-overlays witness` can decide its verdict."""


class HasTargets(Protocol):
    """Protocol of a case, or of the record of one, that concerns some parts of an overlay."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Modules of the parts; empty means every part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """The findings of an overlay's probes in an environment."""

    overlay: str
    parts: tuple[ProbedPart, ...]
    due: bool
    """Whether the overlay's retirement condition holds in the environment."""

    @property
    def verdict(self) -> Verdict:
        """The verdict over all parts, combined as for a reproducer."""
        return verdict_of(self.parts)

    @property
    def telling(self) -> tuple[ProbedPart, ...]:
        """The parts that have this verdict."""
        return tuple(part for part in self.parts if part.verdict is self.verdict)

    @property
    def shapes(self) -> tuple[str, ...]:
        """The shapes of the telling parts, each once."""
        return tuple(dict.fromkeys(part.shape for part in self.telling if part.shape))

    @property
    def evidence(self) -> str:
        """The evidence of the telling parts, as one line."""
        return "; ".join(dict.fromkeys(part.evidence for part in self.telling))

    @property
    def versions(self) -> Mapping[str, str | None]:
        """The versions of the distributions that the overlay concerns."""
        return {
            name: version
            for part in self.parts
            for name, version in {**part.beside, part.distribution: part.version}.items()
        }

    @property
    def is_gate(self) -> bool:
        """Whether this is a gate, which installs nothing."""
        return all(part.gate for part in self.parts)

    def with_reasons(self, unproved: Mapping[tuple[str, str], str]) -> ProbeReport:
        """Return a copy with the reasons of `witness` why parts that look repaired were not proved."""
        parts = []
        for part in self.parts:
            why = unproved.get((self.overlay, part.module)) or unproved.get((self.overlay, ""))
            is_explained = part.looks_repaired and why is not None
            parts.append(dataclasses.replace(part, evidence=f"{part.evidence}; {why}") if is_explained else part)
        return dataclasses.replace(self, parts=tuple(parts))

    def within(self, case: HasTargets) -> ProbeReport:
        """Return a copy with only the parts that a case concerns."""
        return dataclasses.replace(self, parts=tuple(part for part in self.parts if _is_about(case, part)))


def _is_about(case: HasTargets, part: ProbedPart) -> bool:
    return not case.targets or part.module in case.targets


class PartDecision(NamedTuple):
    """The loader's decision about one part of an overlay, made when the target was imported."""

    target: str
    decision: Decision
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptReceipt:
    """A kept receipt that counts as evidence."""

    log: str
    """Path of the log, relative to the folder of packs."""
    said: Mapping[str, frozenset[Sentinel]]
    """The claimed sentinels, by case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """The result of one case of a reproducer."""

    name: str
    device: str
    said: tuple[Conclusion, ...]
    targets: tuple[str, ...] = ()
    """Modules of the parts that the case concerns; empty means every part."""

    @property
    def sentinels(self) -> frozenset[Sentinel]:
        """The sentinels of the conclusions, without the reasons."""
        return frozenset(each.sentinel for each in self.said)


def uncovered(parts: Iterable[ProbedPart], cases: Iterable[HasTargets]) -> tuple[str, ...]:
    """Return the modules of the parts that no case concerns, each once.

    Args:
        parts: the parts that need evidence.
        cases: the cases that gave evidence, here or by receipt.
    """
    cases = tuple(cases)
    return tuple(dict.fromkeys(part.module for part in parts if not any(_is_about(case, part) for case in cases)))


def probe(environment: Environment) -> Mapping[str, ProbeReport]:
    """Return the findings of the probes, by overlay id; no upstream code is imported.

    Raises:
        UpkeepError: this package does not run in that environment.
    """
    asked = other_python.ask(environment.python, ["probe"], _LOOK)
    if asked.problem is not None:
        raise _cannot_look(environment, asked.problem)
    parts: dict[str, list[ProbedPart]] = {}
    due: dict[str, bool] = {}
    for each in asked.answer:
        overlay, due_here, verdict = each.pop("overlay"), each.pop("due"), Verdict(each.pop("verdict"))
        parts.setdefault(overlay, []).append(ProbedPart(verdict=verdict, **each))
        due[overlay] = due_here
    return {id: ProbeReport(overlay=id, parts=tuple(found), due=due[id]) for id, found in parts.items()}


def probe_all(environment: Environment, ids: Collection[str]) -> Mapping[str, ProbeReport]:
    """Return the findings of the probes, by overlay id, after a check that the given overlays are among them; see `probe`.

    Raises:
        UpkeepError: this package does not run in that environment, or an overlay is unknown there.
    """
    found = probe(environment)
    if missing := [each for each in ids if each not in found]:
        raise UpkeepError(f"{environment.lock.path}: its environment knows no overlay {', '.join(missing)}")
    return found


def witness(environment: Environment, packs: Path, ids: Sequence[str], timeout: float) -> Mapping[tuple[str, str], str]:
    """Prove in an environment the parts of overlays that look repaired, and keep the proofs for this environment.

    Args:
        environment: the environment.
        packs: the folder of the reproducers.
        ids: ids of the overlays.
        timeout: seconds for one case.

    Returns:
        The reason why each unproved part was not proved, by the id of the overlay and the module of the part.
    """
    arguments = ["witness", str(packs.resolve()), str(timeout), *ids]
    asked = other_python.ask(environment.python, arguments, _MOST_CASES * len(ids) * timeout + _MARGIN)
    if asked.problem is not None:
        return dict.fromkeys(((each, "") for each in ids), asked.problem)
    return {(each["overlay"], each["module"]): each["reason"] for each in asked.answer if not each["proved"]}


def pre_flight(environment: Environment) -> Mapping[str, tuple[PartDecision, ...]]:
    """Import every installed target in a process, and return the loader's decisions, by overlay id.

    Raises:
        UpkeepError: the process did not end by itself, or printed no audit.
    """
    text, ended = other_python.output(environment.python, ["-m", "megacpp_overlays", "audit", "--json"], _LOOK)
    audit = _last_audit(text)
    if audit is None:
        raise _cannot_look(environment, f"the audit {ended or 'said nothing'}")
    found: dict[str, list[PartDecision]] = {}
    for each in audit["decisions"]:
        decided = PartDecision(each["target"], Decision(each["decision"]), each["reason"])
        found.setdefault(each["id"], []).append(decided)
    return {id: tuple(decisions) for id, decisions in found.items()}


def reproduce(
    environment: Environment,
    pack: inventory.Pack,
    overlay_id: str,
    *,
    timeout: float = TIMEOUT,
    progress: Callable[[str], object] = lambda line: None,
) -> tuple[CaseResult, ...]:
    """Run the cases of an overlay, each without it and then with every overlay, and return their results.

    A case that takes too long, dies or cannot be run at all is FAILED, with the reason.

    Args:
        environment: the environment.
        pack: the pack of the cases.
        overlay_id: the overlay whose cases run.
        timeout: seconds for one process; a case has two.
        progress: receives a line when a case begins, and one when it has ended.

    Raises:
        PackError: the reproducer cannot be loaded.
    """
    found = []
    for case in inventory.load_cases(pack.reproducer):
        if case.overlay == overlay_id:
            progress(f"{pack.name}: case {case.name} (overlay {overlay_id}, {case.device})")
            found.append(_run_case(environment, pack, case, timeout))
            progress(f"  {', '.join(each.sentinel.value for each in found[-1].said)}")
    return tuple(found)


def _run_case(environment: Environment, pack: inventory.Pack, case: Case, timeout: float) -> CaseResult:
    arguments = ["run", str(pack.reproducer.resolve()), case.name, str(timeout)]
    asked = other_python.ask(environment.python, arguments, 2 * timeout + _MARGIN)
    if asked.problem is None:
        said = tuple(Conclusion(Sentinel(sentinel), reason) for sentinel, reason in asked.answer)
    else:
        said = (Conclusion(Sentinel.FAILED, asked.problem),)
    return CaseResult(name=case.name, device=case.device, said=said, targets=case.targets)


def receipts_for(probed: ProbeReport, pack: inventory.Pack, lock: Lock) -> tuple[KeptReceipt, ...]:
    """Return the kept receipts that count as evidence about an overlay on the versions of a lock, the newest first.

    A receipt counts if it is of the present reproducer, its log is unchanged and nothing in it failed. It must have run on
    the released distributions, not on a tree or a stand-in, in the version that the lock pins for each target of the
    overlay, and for torch.

    Raises:
        ManifestError: the manifest next to the pack cannot be read.
    """
    folder = pack.folder.parent
    entry = manifest.entry_of(manifest.read(folder), pack.number)
    digest = inventory.digest(pack.reproducer)
    found = []
    for receipt in (entry or {}).get("receipts", ()):
        of_this = receipt["reproducer"] == digest and receipt["exit_code"] == 0 and receipt["tree"] is None
        said: dict[str, set[Sentinel]] = {}
        for claim in receipt["claims"]:
            if claim["overlay"] == probed.overlay:
                said.setdefault(claim["case"], set()).add(meaning(claim["sentinel"]))
        if said and of_this and _same_versions(receipt["versions"], probed, lock) and _is_as_kept(folder, receipt):
            kept = KeptReceipt(log=receipt["log"], said={case: frozenset(words) for case, words in said.items()})
            found.append((receipt["date"], receipt["log"], kept))
    return tuple(kept for _, _, kept in sorted(found, key=lambda each: each[:2], reverse=True))


def _same_versions(stamped: Mapping[str, str], probed: ProbeReport, lock: Lock) -> bool:
    """Return whether a receipt was made with the versions of a lock; a torch version that either lacks is no difference."""
    for distribution in probed.versions:
        pinned = lock.version(distribution)
        if pinned is None or not _same(stamped.get(distribution), pinned):
            return False
    torch, pinned = stamped.get("torch"), lock.version("torch")
    return torch is None or pinned is None or _same(torch, pinned)


def _same(stamped: str | None, pinned: str) -> bool:
    """Return whether two versions are equal; the lock may omit the CUDA build of torch, which the stamp includes."""
    try:
        one, other = Version(stamped or ""), Version(pinned)
    except InvalidVersion:
        return False
    return one.public == other.public and other.local in {None, one.local}


def _is_as_kept(folder: Path, receipt: Mapping[str, Any]) -> bool:
    log = folder / receipt["log"]
    expected: str = receipt["sha256"]
    return log.is_file() and hashlib.sha256(log.read_bytes()).hexdigest() == expected


def _last_audit(text: str) -> dict[str, Any] | None:
    """Return the last audit in the output of a process; upstream may have printed text before the audit."""
    decoder = json.JSONDecoder()
    starts = [0, *(index + 1 for index, letter in enumerate(text) if letter == "\n")]
    for start in reversed(starts):
        with contextlib.suppress(ValueError):
            found, _ = decoder.raw_decode(text, start)
            if isinstance(found, dict) and "decisions" in found:
                return found
    return None


def _cannot_look(environment: Environment, problem: str) -> UpkeepError:
    return UpkeepError(
        f"{environment.lock.path}: cannot look into the environment of {environment.python}: {problem}; "
        "its lock must pin the dependencies of this package: wrapt, importlib-metadata and packaging"
    )
