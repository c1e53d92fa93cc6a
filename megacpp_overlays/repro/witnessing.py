"""Verdicts on unrecognised upstream code, measured by reproducers and kept for the loader.

Every case of an overlay that this host can run measures upstream alone. If no case sees the defect, the verdict is FIXED. If one does,
the seams of each shape that can be placed are tried out. With the seams no case may see the defect, every part that was tried must be
installed, and the results of neighbour cases must be the same. The verdict is then BROKEN, with the shape that repairs it. Where no shape
repairs it, the verdict BROKEN is kept as not repaired. A case proves nothing if it fails, if it finds nothing to measure although its
target is there, or if it cannot run here.
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
    """Options for running reproducers."""

    packs: Path
    settings: Settings
    """Settings of this process, with the place where witnesses are kept."""
    timeout: float = 900.0
    """Seconds for one case."""
    progress: Callable[[str], None] = lambda line: None
    """Gets a line for each step."""
    workers: int = 1
    """Number of overlays that are proved, or of cases that are confirmed, at the same time."""
    servers: ForkServers | None = None
    """Fork servers for the processes of cases. If None, `prove` and `confirm` start their own."""


_ALONE = frozenset({"liger-kernel"})
"""Distributions whose cases run in Triton's interpreter, so they cannot run in a copy of a process that has imported upstream."""
MOST_TRIALS = 6
"""Limit on the combinations of shapes that are tried out for the parts of an overlay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Result of proving or confirming one part of an overlay."""

    overlay: str
    target: str
    """Module of the part's target."""
    proved: bool
    reason: str
    """The measurement, or why it is no proof."""
    cases: tuple[tuple[str, str], ...] = ()
    """Each case that was run, with the word for its outcome."""
    verdict: Verdict | None = None
    """The verdict that was proved."""
    unrepaired: bool = False
    """Whether a case shows the defect with the seams of this overlay in; seams of another overlay may be missing."""
    confirms: bool = False
    """Whether a probe recognises the part, and its cases were run to confirm the verdict. `proved` then means that no case contradicts it."""

    @property
    def is_confirmed(self) -> bool:
        """Whether a probe recognises the part, a case could run here, and none shows otherwise."""
        return self.confirms and self.proved and any(word != Sentinel.BLOCKED.value for _, word in self.cases)


class _Ran(NamedTuple):
    """A case, with its run on upstream alone and its run with the seams that were tried out."""

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
        """The measurements of both runs."""
        if self.repaired is None:
            return self.alone.seen
        return f"{self.alone.seen}; with the overlay {self.repaired.seen}"


class _Proof(NamedTuple):
    """A verdict that cases earned, with the shape of each part that was tried out."""

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
    """Raised where cases show no unrepaired defect, and the verdict on a part cannot be kept."""


def found_here(overlays: Sequence[Erratum], settings: Settings) -> dict[Erratum, Finding]:
    """Return the findings of probes in the installed upstream, with the kept witnesses that are valid for it."""
    tree = CachedTree(InstalledTree())
    return {part: examine_installed(part, tree, settings) for part in overlays}


def unproved(found: Mapping[Erratum, Finding]) -> tuple[Erratum, ...]:
    """Return the parts that no probe recognises, that could be proved, and that have no valid kept witness."""
    tree = CachedTree(InstalledTree())
    return tuple(part for part, finding in found.items() if can_be_proved(part, finding, tree))


def recognised(found: Mapping[Erratum, Finding], packs: Path) -> tuple[Erratum, ...]:
    """Return the parts of overlays that probes recognise and that have a reproducer in their pack."""
    asked = {part: each for part, each in found.items() if any(packs.glob(f"{part.pack:02}-*/reproduce.py"))}
    unsure = {part.id for part, finding in asked.items() if not _has_an_answer(part, finding)}
    return tuple(part for part in asked if part.id not in unsure)


def _has_an_answer(part: Erratum, finding: Finding) -> bool:
    """Return whether the probe alone predicts the result of the cases.

    A verdict from a witness was measured by the cases themselves, and some shapes have no seam that repairs them.
    """
    if finding.verdict is Verdict.BROKEN and part.installs and finding.shape not in part.repairs:
        return False
    return finding.verdict is not Verdict.UNRECOGNISED and finding.proof is not Proof.WITNESSED


def can_be_proved(part: Erratum, finding: Finding, tree: SourceTree) -> bool:
    """Return whether a reproducer may decide about a part that its probe does not recognise."""
    if finding.verdict is not Verdict.UNRECOGNISED:
        return False
    if isinstance(part, Gate):  # it has no seam to place
        return contract.has_reproducer(part)
    return finding.looks_repaired or bool(contract.of(part, tree).candidates)


def prove(overlays: Sequence[Erratum], parts: Sequence[Erratum], how: WitnessOptions) -> Iterator[Attempt]:
    """Run the cases of parts, keep a witness of each verdict that they earn, and yield the result of each part.

    Overlays that another one needs come first, so that they are proved before it. A case may also need the seams of an overlay that
    is not declared to be needed: where the defect stayed, and other overlays were proved meanwhile, its cases run a second time.

    Args:
        overlays: every declaration of this process, in parts.
        parts: the parts that can be proved.
        how: options for running reproducers.
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
    """Yield the options with fork servers; stop servers that were started here at the end of the block."""
    if how.servers is not None:
        yield how
        return
    with ForkServers() as servers:
        yield replace(how, servers=servers)


def _needs(parts: Sequence[Erratum], overlay_id: str) -> set[str]:
    return {name for part in parts if part.id == overlay_id for name in getattr(part, "needs", ())}


def _needed_first(parts: Sequence[Erratum]) -> list[str]:
    """Return the ids of overlays, each after the overlays that it needs; overlays that others need come as early as possible."""
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
        parts: the parts of one overlay.
        how: options for running reproducers.
        alone: runs of cases on upstream alone, by overlay; runs of this overlay are added where they are missing.
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
    """Return a proof for a part without a case of its own, from the cases of the other parts.

    The part was tried out together with them. Their cases never prove it FIXED.

    Raises:
        _NoProofError: nothing was tried.
    """
    if proof.verdict is not Verdict.BROKEN:
        raise _NoProofError("its pack has no case for it")
    return proof


class _CaseRunner:
    """Runner of the cases of an overlay, without overlays and with the seams that are tried out."""

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
            case: the case to run.
            is_broken: whether a probe says BROKEN about a part of its overlay that seams may repair.
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
            self._how.progress("\n".join(lines))  # cases run in parallel

    def verdict(
        self,
        part: Erratum,
        parts: Sequence[Erratum],
        about: Sequence[_Ran],
        trials: dict[tuple[str, ...], _Proof | _NoProofError],
    ) -> _Proof:
        """Return the proof by the cases about a part; where a case sees the defect, seams are tried out.

        Args:
            part: the part to prove.
            parts: all parts of its overlay that are to be proved.
            about: the cases about the part, measured on upstream alone.
            trials: results of earlier trials, by names of cases; a new trial is added.

        Raises:
            _NoProofError: the cases show nothing, or the defect without a repair.
        """
        asked = _asked(about)
        if all(each.alone.kind is not RunKind.BROKEN for each in asked):
            _demand_code_as_read(part, asked)
            if all(each.alone.kind is RunKind.ABSENT for each in asked):
                # The target is there: it looks repaired, or its seams can be placed. The case lacks something else that it needs.
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
        """Try shapes of all parts at once, until the seams of one combination repair the defect that the cases see."""
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
        """Return why a trial is no repair, or None where it repairs the defect."""
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
        # Other overlays that were proved here may change a neighbour. Then both sides of the comparison run with them.
        with_others = runner.without_case(self._job(ran.case), ran.case, self._transcript)
        return self._neighbour_problem(ran.case, with_others, run)

    def _neighbour_problem(self, case: Case, without: Run, repaired: Run) -> str | None:
        """Describe the first neighbour of a case that differs with the seams; None where none does."""
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
        _NoProofError: no case measured something, or one failed.
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
    """Return the result of a run for a part; UNRECOGNISED where the run has none."""
    for each in run.parts:
        if each.module == part.target.module:
            return each
    return Part(
        module=part.target.module, verdict=Verdict.UNRECOGNISED, shape=None, evidence="", decision=None, reason=""
    )


def _kept(part: Erratum, proof: _Proof, reproducer: Path, how: WitnessOptions) -> Attempt:
    """Write the witness of a proof for a part, and return the proof as an attempt.

    Raises:
        _NoProofError: the source that was read cannot be proved, or the witness cannot be kept.
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
    """Keep a witness that cases showed the defect and no repair of it.

    Where the witness cannot be kept, the part is unproved, and no seam is in either.
    """
    with contextlib.suppress(_NoProofError, OSError):
        _keep(part, _Proof(Verdict.BROKEN, {}, tuple(shown)), reproducer, how, unrepaired=reason)


def _keep(
    part: Erratum, proof: _Proof, reproducer: Path, how: WitnessOptions, *, unrepaired: str | None = None
) -> None:
    """Write the witness of a part.

    Raises:
        _NoProofError: the source that was read cannot be proved.
        OSError: the witness cannot be written.
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
    """Return the attempt for a requested part that its probe recognises, or that cannot be proved."""
    needs_none = finding.verdict is not Verdict.UNRECOGNISED
    why = "there is nothing to prove" if needs_none else "its seams cannot be placed"
    reason = f"{why}: the probe says {finding.verdict.value}: {finding.summary()}"
    return Attempt(overlay=part.id, target=part.target.module, proved=needs_none, reason=reason)


def confirm(overlays: Sequence[Erratum], parts: Sequence[Erratum], how: WitnessOptions) -> Iterator[Attempt]:
    """Run the cases of parts that probes recognise, without their overlay and with every overlay, and report contradictions.

    A recorded form that says BROKEN is out of date where a release repairs the defect elsewhere, which the text does not show.

    Args:
        overlays: every declaration of this process, in parts.
        parts: the parts that probes recognise.
        how: options for running reproducers.
    """
    first: dict[str, Erratum] = {}
    for part in parts:
        first.setdefault(part.id, part)
    progress = Progress(len(first))
    with _with_servers(how) as how, ThreadPoolExecutor(how.workers) as pool:
        begun = [(part, _runner_or_problem(overlays, part, how)) for part in first.values()]
        broken = _broken(overlays, parts, how.settings)
        cases = [(each, case) for _, each in begun if isinstance(each, _CaseRunner) for case in each.cases]
        judged = pool.map(  # cancels the waiting cases when this is interrupted
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
    """Return the ids of overlays that a probe calls BROKEN and that seams may repair."""
    ids, tree = {part.id for part in parts}, CachedTree(InstalledTree())
    chosen = [part for part in overlays if part.id in ids and part.installs]
    return {part.id for part in chosen if examine_installed(part, tree, settings).verdict is Verdict.BROKEN}


def _runner_or_problem(overlays: Sequence[Erratum], part: Erratum, how: WitnessOptions) -> _CaseRunner | PackError:
    """Return the runner of the cases of a part's overlay, or the error where its pack cannot be read."""
    try:
        return _CaseRunner.of(overlays, part, how)
    except PackError as error:
        return error


def confirmation(attempt: Attempt) -> str:
    """Return a phrase for the result of confirming a part that a probe recognises."""
    if not attempt.proved:
        return "contradicted"
    return "as recognised" if attempt.is_confirmed else "recognised, and no case can run here"


def _confirmed(part: Erratum, found: Sequence[tuple[Case, Conclusion]]) -> Attempt:
    """Compare the conclusions of an overlay's cases with its probe. One case that shows the defect is enough, as in a proof."""
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
    """Prove anew the unrecognised parts of the overlays with these ids; return for the other parts why there is nothing to prove."""
    tree = CachedTree(InstalledTree())
    findings = {part: unless_published(part, examine(part, tree), tree) for part in overlays if part.id in ids}
    looking = [part for part, finding in findings.items() if can_be_proved(part, finding, tree)]
    found = {part.id for part in looking}
    others = [nothing_to_prove(part, each) for part, each in findings.items() if part.id not in found]
    return (*prove(overlays, looking, how), *others)
