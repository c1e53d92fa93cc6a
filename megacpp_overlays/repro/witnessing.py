"""Prove by reproducers what probes do not recognise, and keep the verdicts for the loader.

Every case of an overlay that this host can run measures upstream alone. Where none sees the defect, the verdict is FIXED. Where one
does, the seams of each shape that can be placed are tried out: no case may see the defect then, every part that was tried must be in, and
neighbour cases must be the same. That is BROKEN, with the shape that repairs it; where no shape does, it is kept as BROKEN and not
repaired. A case that fails, or finds nothing to ask although its target is there, is no answer, and one that cannot run here has none.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from megacpp_overlays.loader import contract, witnesses
from megacpp_overlays.loader.probing import examine, examine_installed, unless_published
from megacpp_overlays.loader.settings import Settings
from megacpp_overlays.model import Decision, Erratum, Finding, Gate, Proof, Verdict
from megacpp_overlays.repro import inventory, judge, neighbour, runner, stamp
from megacpp_overlays.repro.case import Case, PackError
from megacpp_overlays.repro.forked import ForkServers
from megacpp_overlays.repro.judge import Conclusion, Part, Run, RunKind, Sentinel
from megacpp_overlays.repro.progress import Progress
from megacpp_overlays.repro.transcript import Transcript
from megacpp_overlays.source import distributions
from megacpp_overlays.source.trees import CachedTree, InstalledTree, SourceTree


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
    workers: int = 1
    """Overlays that are proved, or cases that are confirmed, at the same time."""
    servers: ForkServers | None = None
    """Fork servers for the processes of cases. If None, `prove` and `confirm` start their own."""


_ALONE = frozenset({"liger-kernel"})
"""Distributions whose cases run in Triton's interpreter, and so in no copy of a process that has imported upstream."""
MOST_TRIALS = 6
"""Combinations of shapes of the parts of an overlay that are tried out."""


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
    """Each case that was run, with the word for what it showed."""
    verdict: Verdict | None = None
    """What was proved."""
    unrepaired: bool = False
    """Whether a case shows the defect with the seams of this overlay in; seams of another overlay may be missing."""
    confirms: bool = False
    """Whether a probe recognises the part, and its cases were run to see whether that is so; `proved` says that none shows otherwise."""

    @property
    def is_confirmed(self) -> bool:
        """Whether a probe recognises the part, a case could run here, and none shows otherwise."""
        return self.confirms and self.proved and any(word != Sentinel.BLOCKED.value for _, word in self.cases)


class _Ran(NamedTuple):
    """A case, what it measured of upstream alone, and with seams that were tried out."""

    case: Case
    alone: Run
    repaired: Run | None = None

    @property
    def word(self) -> str:
        """Outcome of the case, such as `broken, with the overlay sound`."""
        if self.repaired is None:
            return self.alone.kind.value
        return f"{self.alone.kind.value}, with the overlay {self.repaired.kind.value}"

    @property
    def seen(self) -> str:
        """What it measured."""
        if self.repaired is None:
            return self.alone.seen
        return f"{self.alone.seen}; with the overlay {self.repaired.seen}"


class _Proof(NamedTuple):
    """A verdict that cases earned, and for each part that was tried out the shape."""

    verdict: Verdict
    shapes: Mapping[str, str]
    ran: tuple[_Ran, ...]


class _NoProofError(Exception):
    """Raised where cases prove nothing; the text says why."""

    def __init__(self, reason: str, ran: Sequence[_Ran] = (), *, unrepaired: bool = False) -> None:
        super().__init__(reason)
        self.ran = tuple(ran)
        self.unrepaired = unrepaired


class _NotKeptError(_NoProofError):
    """Raised where cases show no defect that stays, and no verdict of a part can be kept."""


def found_here(overlays: Sequence[Erratum], settings: Settings) -> dict[Erratum, Finding]:
    """Return what probes find in the installed upstream, with the witnesses that count."""
    tree = CachedTree(InstalledTree())
    return {part: examine_installed(part, tree, settings) for part in overlays}


def unproved(found: Mapping[Erratum, Finding]) -> tuple[Erratum, ...]:
    """Return the parts that no probe recognises, that could be proved, and of which no kept witness counts."""
    tree = CachedTree(InstalledTree())
    return tuple(part for part, finding in found.items() if can_be_proved(part, finding, tree))


def recognised(found: Mapping[Erratum, Finding], packs: Path) -> tuple[Erratum, ...]:
    """Return the parts of overlays that probes recognise, and of which a pack has a reproducer."""
    asked = {part: each for part, each in found.items() if any(packs.glob(f"{part.pack:02}-*/reproduce.py"))}
    unsure = {part.id for part, finding in asked.items() if not _has_an_answer(part, finding)}
    return tuple(part for part in asked if part.id not in unsure)


def _has_an_answer(part: Erratum, finding: Finding) -> bool:
    """Return whether a probe says by itself what cases must show: that of a witness was measured, and no seam repairs some shapes."""
    if finding.verdict is Verdict.BROKEN and part.installs and finding.shape not in part.repairs:
        return False
    return finding.verdict is not Verdict.UNRECOGNISED and finding.proof is not Proof.WITNESSED


def can_be_proved(part: Erratum, finding: Finding, tree: SourceTree) -> bool:
    """Return whether a reproducer may say more of a part than its probe does."""
    if finding.verdict is not Verdict.UNRECOGNISED:
        return False
    if isinstance(part, Gate):  # it has no seam to place
        return contract.has_reproducer(part)
    return finding.looks_repaired or bool(contract.of(part, tree).candidates)


def prove(overlays: Sequence[Erratum], parts: Sequence[Erratum], how: WitnessOptions) -> Iterator[Attempt]:
    """Run the cases of parts, keep a witness of each verdict that they earn, and say what became of it.

    Overlays that another one needs come first, so that it finds them proved. A case may also need the seams of an overlay that
    is not declared to be needed: where the defect stayed, and other overlays were proved meanwhile, its cases run a second time.

    Args:
        overlays: every declaration of this process, in parts.
        parts: those that can be proved.
        how: how to run reproducers.
    """
    ids = _needed_first(parts)
    progress = Progress(len(ids))
    alone: dict[str, list[Run]] = {}
    ended = {each: threading.Event() for each in ids}
    tried: dict[str, list[Attempt]] = {}

    def one(overlay_id: str) -> list[Attempt]:
        for name in _needs(parts, overlay_id) & {*ids[: ids.index(overlay_id)]}:
            ended[name].wait()
        chosen = [part for part in parts if part.id == overlay_id]
        lines: list[str] = []
        try:
            found = list(_prove_one(overlays, chosen, replace(how, progress=lines.append), alone))
        finally:
            ended[overlay_id].set()
        verdicts = ", ".join(dict.fromkeys(each.verdict.value if each.verdict else "not proved" for each in found))
        text = f"{overlay_id}: {verdicts}"
        how.progress("\n".join([*lines, f"once more: {text}" if overlay_id in tried else progress.done(text)]))
        return found

    with _with_servers(how) as how, ThreadPoolExecutor(how.workers) as pool:
        tried |= dict(zip(ids, pool.map(one, ids), strict=True))
        repaired = {each.overlay for found in tried.values() for each in found if each.verdict is Verdict.BROKEN}
        again = [name for name, found in tried.items() if any(each.unrepaired for each in found) and repaired - {name}]
        tried |= dict(zip(again, pool.map(one, again), strict=True))
    yield from itertools.chain.from_iterable(tried.values())


@contextlib.contextmanager
def _with_servers(how: WitnessOptions) -> Iterator[WitnessOptions]:
    """Yield the options with fork servers. Servers that are started here end with the block."""
    if how.servers is not None:
        yield how
        return
    with ForkServers() as servers:
        yield replace(how, servers=servers)


def _needs(parts: Sequence[Erratum], overlay_id: str) -> set[str]:
    return {name for part in parts if part.id == overlay_id for name in getattr(part, "needs", ())}


def _needed_first(parts: Sequence[Erratum]) -> list[str]:
    """Return the ids of overlays in an order in which each comes after those that it needs, and the needed ones at once."""
    waiting = list(dict.fromkeys(part.id for part in parts))
    needed = {name for each in waiting for name in _needs(parts, each)}
    waiting.sort(key=lambda each: each not in needed)
    ordered: list[str] = []
    while waiting:
        ready = [each for each in waiting if not _needs(parts, each) & {*waiting}] or waiting
        ordered += ready
        waiting = [each for each in waiting if each not in ready]
    return ordered


def _prove_one(
    overlays: Sequence[Erratum], parts: Sequence[Erratum], how: WitnessOptions, alone: dict[str, list[Run]]
) -> Iterator[Attempt]:
    """Prove the parts of one overlay.

    Args:
        overlays: every declaration of this process, in parts.
        parts: of one overlay.
        how: how to run reproducers.
        alone: what its cases measured of upstream alone, by overlay, if they ran before; gets it otherwise.
    """
    try:
        measuring = _CaseRunner.of(overlays, parts[0], how)
        if parts[0].id not in alone:
            alone[parts[0].id] = [measuring.alone(case) for case in measuring.cases]
        ran = [_Ran(case, run) for case, run in zip(measuring.cases, alone[parts[0].id], strict=True)]
    except PackError as error:
        yield from (_failed(part, str(error)) for part in parts)
        return
    trials: dict[tuple[str, ...], _Proof | _NoProofError] = {}
    for part in parts:
        own = [each for each in ran if not each.case.targets or part.target.module in each.case.targets]
        about = own or ran
        try:
            proof = measuring.verdict(part, parts, about, trials)
            yield _kept(part, proof if own else _of_others(proof), measuring.reproducer, how)
        except _NoProofError as reason:
            used = reason.ran or about
            witnesses.forget(part, how.settings)
            shown = [each for each in own if each.alone.kind is RunKind.BROKEN]
            if shown and not isinstance(reason, _NotKeptError):
                _keep_unrepaired(part, str(reason), shown, measuring.reproducer, how)
            words = tuple((each.case.name, each.word) for each in used)
            yield replace(_failed(part, str(reason), words), unrepaired=reason.unrepaired)


def _of_others(proof: _Proof) -> _Proof:
    """Return a proof for a part without a case of its own: it was tried with the others, and is never FIXED by their cases.

    Raises:
        _NoProofError: nothing was tried.
    """
    if proof.verdict is not Verdict.BROKEN:
        raise _NoProofError("its pack has no case for it")
    return proof


class _CaseRunner:
    """The cases of an overlay, ready to be run without overlays and with seams that are tried out."""

    def __init__(
        self,
        pack: inventory.Pack,
        every: tuple[Case, ...],
        overlays: tuple[Erratum, ...],
        part: Erratum,
        how: WitnessOptions,
    ) -> None:
        self.cases = tuple(case for case in every if case.overlay == part.id)
        self.reproducer = pack.reproducer
        self._pack, self._every, self._overlays, self._how = pack, every, overlays, how
        self._transcript = Transcript([], how.progress)
        targets = {each.target for each in overlays if each.installs}
        self._loaded = tuple(sorted({each.module for each in targets if each.distribution not in _ALONE}))

    @classmethod
    def of(cls, overlays: Sequence[Erratum], part: Erratum, how: WitnessOptions) -> _CaseRunner:
        """Load the cases of the overlay of a part.

        Raises:
            PackError: its pack cannot be read.
        """
        pack = inventory.find(how.packs, part.pack)
        return cls(pack, inventory.load_cases(pack.reproducer), tuple(overlays), part, how)

    def alone(self, case: Case) -> Run:
        """Measure upstream alone."""
        return runner.witness_case(self._job(case), case, self._transcript)

    def judged(self, case: Case, *, is_broken: bool) -> tuple[Conclusion, ...]:
        """Measure upstream without the overlay of a case and with every overlay, and compare both with its probe.

        Args:
            case: that is run.
            is_broken: whether a probe says so of a part of its overlay that seams may repair.
        """
        if not runner.can_run(case):
            return (Conclusion(Sentinel.BLOCKED, runner.NO_DEVICE),)
        lines: list[str] = []
        try:
            run_case = runner.confirm_case if is_broken else runner.run_case
            return run_case(self._job(case), case, Transcript([], lines.append))
        except PackError as error:
            return (Conclusion(Sentinel.FAILED, str(error)),)
        finally:
            self._how.progress("\n".join(lines))  # cases run beside each other

    def verdict(
        self,
        part: Erratum,
        parts: Sequence[Erratum],
        about: Sequence[_Ran],
        trials: dict[tuple[str, ...], _Proof | _NoProofError],
    ) -> _Proof:
        """Return what the cases about a part show, with seams tried out where one sees the defect.

        Args:
            part: that is proved.
            parts: all parts of its overlay that are.
            about: the cases about the part, measured on upstream alone.
            trials: what was tried for other parts; gets what is tried for this one.

        Raises:
            _NoProofError: they show nothing, or the defect without a repair.
        """
        asked = _asked(about)
        if all(each.alone.kind is not RunKind.BROKEN for each in asked):
            _demand_code_as_read(part, asked)
            if all(each.alone.kind is RunKind.ABSENT for each in asked):
                # The target is there: it looks repaired, or its seams can be placed. Something else that a case needs is not.
                raise _NoProofError(
                    f"case {asked[0].case.name}: it found nothing to ask, and its target is there: {asked[0].alone.seen}"
                )
            return _Proof(Verdict.FIXED, {}, tuple(asked))
        names = tuple(each.case.name for each in asked)
        if names not in trials:
            trials[names] = self._repaired(parts, asked)
        found = trials[names]
        if isinstance(found, _NoProofError):
            raise found
        return found

    def _repaired(self, parts: Sequence[Erratum], asked: Sequence[_Ran]) -> _Proof | _NoProofError:
        """Try shapes of all parts at once, until the seams of one combination repair what the cases see."""
        tree = CachedTree(InstalledTree())
        candidates = {part.target.module: contract.of(part, tree).candidates for part in parts}
        shapes = {module: found[::-1] for module, found in candidates.items() if found}
        broken = next(each for each in asked if each.alone.kind is RunKind.BROKEN)
        seen = f"case {broken.case.name}: it shows the defect: {broken.alone.seen}"
        if not shapes:
            return _NoProofError(seen)
        why = ""
        for tried in itertools.islice(itertools.product(*shapes.values()), MOST_TRIALS):
            chosen = dict(zip(shapes, tried, strict=True))
            ran: list[_Ran] = []
            for each in asked:
                run = runner.trial_case(self._job(each.case), each.case, chosen, self._transcript)
                ran.append(_Ran(each.case, each.alone, run))
                if (problem := self._problem(ran[-1], chosen)) is not None:
                    why = f"case {each.case.name}, seams of {', '.join(tried)}: {problem}"
                    break
            else:
                return _Proof(Verdict.BROKEN, chosen, tuple(ran))
        return _NoProofError(f"{seen}; broken, not repaired: {why}", asked, unrepaired=True)

    def _problem(self, ran: _Ran, shapes: Mapping[str, str]) -> str | None:
        """Return why a trial is no repair, or None where it is one."""
        run = ran.repaired
        if run is None or run.kind not in {RunKind.SOUND, ran.alone.kind}:
            return f"{run.kind.value}: {run.seen}" if run else "not run"
        if run.kind is RunKind.BROKEN:
            return run.seen
        if run.kind is RunKind.SOUND and ran.alone.kind is RunKind.BROKEN:
            tried = [part for part in run.parts if part.module in shapes]
            if out := [part for part in tried if part.decision not in {Decision.ACTIVE, Decision.ARMED}]:
                return judge.decisions(out)
            if not any(part.decision is Decision.ACTIVE for part in tried):
                return "it is not broken, but no seam is in"
        if self._neighbour_problem(ran.case, ran.alone, run) is None:
            return None
        # Other overlays that were proved here may change a neighbour; then both sides of the comparison have them in.
        with_others = runner.without_case(self._job(ran.case), ran.case, self._transcript)
        return self._neighbour_problem(ran.case, with_others, run)

    def _neighbour_problem(self, case: Case, without: Run, repaired: Run) -> str | None:
        """Return which neighbour of a case is not the same with the seams, or None."""
        neighbours = neighbour.of(case, self._every, self._pack.folder)
        problems = (
            neighbour.problem(each, without.beside.get(each.name), repaired.beside.get(each.name))
            for each in neighbours
        )
        return next(filter(None, problems), None)

    def _job(self, case: Case) -> runner.Job:
        return runner.Job(
            reproducer=self.reproducer,
            cases=(case,),
            overlays=self._overlays,
            command="",
            timeout=self._how.timeout,
            servers=self._how.servers,
            loaded=self._loaded,
        )


def _asked(about: Sequence[_Ran]) -> list[_Ran]:
    """Return the cases that measured something.

    Raises:
        _NoProofError: there is none, or one failed.
    """
    if not about:
        raise _NoProofError("its pack has no case for it")
    for each in about:
        if each.alone.kind is RunKind.FAILED:
            raise _NoProofError(f"case {each.case.name}: it failed: {each.alone.seen}")
    asked = [each for each in about if each.alone.kind is not RunKind.BLOCKED]
    if not asked:
        why = "; ".join(f"case {each.case.name}: {each.alone.seen}" for each in about)
        raise _NoProofError(f"no case can run here: {why}")
    return asked


def _demand_code_as_read(part: Erratum, asked: Sequence[_Ran]) -> None:
    for each in asked:
        if each.alone.kind is RunKind.SOUND and (other := _of(each.alone, part).difference) is not None:
            raise _NoProofError(f"case {each.case.name}: it failed: {other}")


def _of(run: Run, part: Erratum) -> Part:
    """Return what a run has of a part."""
    for each in run.parts:
        if each.module == part.target.module:
            return each
    return Part(
        module=part.target.module, verdict=Verdict.UNRECOGNISED, shape=None, evidence="", decision=None, reason=""
    )


def _kept(part: Erratum, proof: _Proof, reproducer: Path, how: WitnessOptions) -> Attempt:
    """Keep what was proved of a part, and return it as an attempt.

    Raises:
        _NoProofError: another source was read than can be proved, or it cannot be kept.
    """
    module = part.target.module
    if proof.verdict is Verdict.BROKEN and not any(
        _of(each.repaired, part).decision is Decision.ACTIVE for each in proof.ran if each.repaired
    ):
        raise _NotKeptError("the defect is repaired by other parts; no case has loaded this one", proof.ran)
    try:
        _keep(part, proof, reproducer, how)
    except OSError as error:
        raise _NotKeptError(
            f"it was shown and cannot be kept: {error.filename}: {error.strerror}", proof.ran
        ) from error
    finding = examine_installed(part, CachedTree(InstalledTree()), how.settings)
    if finding.proof is not Proof.WITNESSED:
        raise _NotKeptError(f"it was shown, and does not hold any more: {finding.evidence[-1]}", proof.ran)
    return Attempt(
        overlay=part.id,
        target=module,
        proved=True,
        reason=str(finding.evidence[-1]),
        cases=tuple((each.case.name, each.word) for each in proof.ran),
        verdict=proof.verdict,
    )


def _keep_unrepaired(part: Erratum, reason: str, shown: Sequence[_Ran], reproducer: Path, how: WitnessOptions) -> None:
    """Keep that cases showed the defect and no repair of it. Where that cannot be kept the part is unproved, and no seam is in either."""
    with contextlib.suppress(_NoProofError, OSError):
        _keep(part, _Proof(Verdict.BROKEN, {}, tuple(shown)), reproducer, how, unrepaired=reason)


def _keep(
    part: Erratum, proof: _Proof, reproducer: Path, how: WitnessOptions, *, unrepaired: str | None = None
) -> None:
    """Write the witness of a part.

    Raises:
        _NoProofError: another source was read than can be proved.
        OSError: it cannot be written.
    """
    sources: dict[str, str | None] = {}
    for each in proof.ran:
        read = _of(each.alone, part).sources
        if read is None and each.alone.kind is RunKind.ABSENT:
            continue
        if read is None or any(sources.get(name, sha256) != sha256 for name, sha256 in read.items()):
            raise _NoProofError(f"case {each.case.name}: another source was read than looks repaired", proof.ran)
        sources |= read
    if not sources:
        raise _NoProofError("no case says which source it ran on", proof.ran)
    names = {name for each in proof.ran for name in each.case.versions} | {part.target.distribution, *part.companions}
    taken = stamp.take(reproducer, [each.case for each in proof.ran], [part.target], None)
    data = witnesses.content(
        part,
        sources=sources,
        versions={name: distributions.version(name) for name in names},
        reproducer=reproducer,
        cases=[{"case": each.case.name, "device": each.case.device, "seen": each.seen} for each in proof.ran],
        host=taken.host,
        date=taken.date,
        verdict=proof.verdict,
        shape=proof.shapes.get(part.target.module),
        unrepaired=unrepaired,
    )
    witnesses.keep(witnesses.path_of(part, how.settings), data, shared=witnesses.is_shared(how.settings))


def _failed(part: Erratum, reason: str, cases: tuple[tuple[str, str], ...] = ()) -> Attempt:
    return Attempt(overlay=part.id, target=part.target.module, proved=False, reason=reason, cases=cases)


def nothing_to_prove(part: Erratum, finding: Finding) -> Attempt:
    """Return the answer for a part that was asked for and that its probe recognises, or that cannot be proved."""
    needs_none = finding.verdict is not Verdict.UNRECOGNISED
    what = "there is nothing to prove" if needs_none else "its seams cannot be placed"
    reason = f"{what}: the probe says {finding.verdict.value}: {finding.summary()}"
    return Attempt(overlay=part.id, target=part.target.module, proved=needs_none, reason=reason)


def confirm(overlays: Sequence[Erratum], parts: Sequence[Erratum], how: WitnessOptions) -> Iterator[Attempt]:
    """Run the cases of parts that probes recognise, without their overlay and with every one, and say where behaviour is otherwise.

    A form that says BROKEN is out of date where a release repairs the defect elsewhere, and no text says so.

    Args:
        overlays: every declaration of this process, in parts.
        parts: those that are recognised.
        how: how to run reproducers.
    """
    first: dict[str, Erratum] = {}
    for part in parts:
        first.setdefault(part.id, part)
    progress = Progress(len(first))
    with _with_servers(how) as how, ThreadPoolExecutor(how.workers) as pool:
        begun = [(part, _runner_or_problem(overlays, part, how)) for part in first.values()]
        broken = _broken(overlays, parts, how.settings)
        cases = [(each, case) for _, each in begun if isinstance(each, _CaseRunner) for case in each.cases]
        judged = pool.map(  # leaves out what waits when this is interrupted
            lambda pair: pair[0].judged(pair[1], is_broken=pair[1].overlay in broken), cases
        )
        for part, each in begun:
            if isinstance(each, _CaseRunner):
                found = _confirmed(part, [(case, one) for case in each.cases for one in next(judged)])
            else:
                found = replace(_failed(part, str(each)), confirms=True)
            how.progress(progress.done(f"{part.id}: {confirmation(found)}"))
            yield found


def _broken(overlays: Sequence[Erratum], parts: Sequence[Erratum], settings: Settings) -> set[str]:
    """Return the ids of overlays of which a probe says BROKEN, and seams may repair it."""
    ids, tree = {part.id for part in parts}, CachedTree(InstalledTree())
    chosen = [part for part in overlays if part.id in ids and part.installs]
    return {part.id for part in chosen if examine_installed(part, tree, settings).verdict is Verdict.BROKEN}


def _runner_or_problem(overlays: Sequence[Erratum], part: Erratum, how: WitnessOptions) -> _CaseRunner | PackError:
    """Return the cases of the overlay of a part, ready to be run, or why its pack cannot be read."""
    try:
        return _CaseRunner.of(overlays, part, how)
    except PackError as error:
        return error


def confirmation(attempt: Attempt) -> str:
    """Return in words what cases say of a part that a probe recognises."""
    if not attempt.proved:
        return "contradicted"
    return "as recognised" if attempt.is_confirmed else "recognised, and no case can run here"


def _confirmed(part: Erratum, found: Sequence[tuple[Case, Conclusion]]) -> Attempt:
    """Compare what the cases of an overlay concluded with its probe. One case that shows the defect is enough, as in a proof."""
    shown = any(each.sentinel is Sentinel.BUG_REPRODUCED for _, each in found)
    said = "; ".join(f"case {case.name}: {each.sentinel.value}: {each.reason}" for case, each in found)
    return Attempt(
        overlay=part.id,
        target=part.target.module,
        proved=all(each.sentinel is not Sentinel.FAILED or (shown and each.shows_nothing) for _, each in found),
        reason=said or "its pack has no case for it",
        cases=tuple((case.name, each.sentinel.value) for case, each in found),
        confirms=True,
    )


def asked_for(overlays: Sequence[Erratum], ids: Sequence[str], how: WitnessOptions) -> tuple[Attempt, ...]:
    """Prove anew what probes do not recognise of the overlays with these ids; of the others say why there is nothing to prove."""
    tree = CachedTree(InstalledTree())
    findings = {part: unless_published(part, examine(part, tree), tree) for part in overlays if part.id in ids}
    looking = [part for part, finding in findings.items() if can_be_proved(part, finding, tree)]
    found = {part.id for part in looking}
    others = [nothing_to_prove(part, each) for part, each in findings.items() if part.id not in found]
    return (*prove(overlays, looking, how), *others)
