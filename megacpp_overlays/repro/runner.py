"""The runner of a reproducer's cases, each in two fresh processes: without its overlay, then with every overlay.

A case whose overlay was retired, a case of a gate and a claim run in one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import megacpp_overlays
from megacpp_overlays import json_text, variables
from megacpp_overlays.loader import retired
from megacpp_overlays.loader.settings import DISABLE, LOG, MODE, PLUGINS, WITNESSES, Mode, Switch
from megacpp_overlays.model import Decision, Erratum, Verdict
from megacpp_overlays.repro import forked, inventory, judge, neighbour, stamp, trees
from megacpp_overlays.repro.case import CPU, CUDA, Case
from megacpp_overlays.repro.judge import EARNED, Conclusion, Part, Run, RunKind, Sentinel
from megacpp_overlays.repro.transcript import Transcript
from megacpp_overlays.runtime import visible_gpus

PASSED, FAILED, NOTHING_RAN = 0, 1, 3

NO_DEVICE = "needs a CUDA device"
"""Reason why a case is blocked."""
_PROBE_ONLY = "--probe-only"
_TAIL = 15
"""Lines of a failed run that are shown."""
_MOST = 300
"""Lines of a run that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Cases of one reproducer to run, with their options."""

    reproducer: Path
    cases: tuple[Case, ...]
    overlays: tuple[Erratum, ...]
    """Every overlay of this process, in parts."""
    command: str
    """Command line that repeats the run; without paths."""
    tree: Path | None = None
    timeout: float = 900.0
    """Seconds for one process."""
    servers: forked.ForkServers | None = None
    """Fork servers of the processes. If None, each process is a new Python."""
    loaded: tuple[str, ...] = ()
    """Modules of upstream that the copies of `confirm_case` have imported."""


def run(job: Job, transcript: Transcript) -> tuple[stamp.Stamp, int]:
    """Run every case, and write the sentinels that each one earned to the transcript.

    Returns:
        The stamp, and the exit code: 0 when something was earned and nothing failed, 1 when anything failed,
        3 when everything was blocked, so that a CI cannot take "nothing ran here" for success.

    Raises:
        PackError: a case names an overlay or a target that is not there, or the tree holds none of the packages.
    """
    targets = tuple(target for case in job.cases for target in inventory.targets_of(case, job.overlays))
    taken = stamp.take(job.reproducer, job.cases, targets, job.tree)
    transcript.say(taken.line())
    transcript.say(f"$ {job.command}")
    said: list[Conclusion] = []
    for case in job.cases:
        found = run_case(job, case, transcript)
        for each in found:
            transcript.say(f"{case.word(each.sentinel)}: {each.reason} (case {case.name})")
        said += found
    code = exit_code([each.sentinel for each in said])
    transcript.say(f"exit code {code}")
    return taken, code


def exit_code(sentinels: Sequence[Sentinel]) -> int:
    """Return the exit code for the sentinels of a run."""
    if Sentinel.FAILED in sentinels:
        return FAILED
    return PASSED if EARNED & set(sentinels) else NOTHING_RAN


def can_run(case: Case) -> bool:
    """Return whether this host has the device of a case."""
    return case.device != CUDA or bool(visible_gpus.visible())


def run_case(job: Job, case: Case, transcript: Transcript) -> tuple[Conclusion, ...]:
    """Run one case of a job, and return its conclusions."""
    own = "" if case.fix_sentinel == Sentinel.FIX_VALIDATED.value else f", fix shown by {case.fix_sentinel}"
    about = f"overlay {case.overlay}{own}" if case.overlay else f"claim: {case.claim}"
    transcript.say(f"case {case.name} ({about}): {case.device}")
    parts = inventory.parts_of(case, job.overlays)
    gone = retired.find(case.overlay) if case.overlay and not parts else None
    with tempfile.TemporaryDirectory(prefix="repro-") as folder:
        process = _Process(job, case, Path(folder), transcript)
        if not can_run(case):
            if parts:
                _show_probe(process.run({}, options=[_PROBE_ONLY]), transcript)
            return (Conclusion(Sentinel.BLOCKED, NO_DEVICE),)
        if gone is not None:
            transcript.say(f"  regression guard: {gone}")
            alone = process.run({})  # the measurement may need other overlays of its pack
            transcript.say(f"  upstream alone: {_in_words(alone)}")
            return judge.guard(alone, gone)
        if case.overlay is None:
            alone = process.run({})
            transcript.say(f"  upstream: {_in_words(alone)}")
            return judge.claim(alone)
        if not any(part.installs for part in parts):
            alone = process.run({})
            _show_probe(alone, transcript)
            transcript.say(f"  the combination: {_in_words(alone)}")
            return judge.gate(alone)
        without = process.run({DISABLE: case.overlay})
        _show_probe(without, transcript)
        transcript.say(f"  without the overlay: {_in_words(without)}")
        if without.kind not in {RunKind.BROKEN, RunKind.SOUND}:
            return judge.judge(without, None)
        with_all = process.run(_switches(parts))
        transcript.say(f"  with every overlay: {_in_words(with_all)}")
        return (*judge.judge(without, with_all), *_neighbours(job, case, without, with_all, transcript))


def confirm_case(job: Job, case: Case, transcript: Transcript) -> tuple[Conclusion, ...]:
    """Run one case whose probe says BROKEN, like `run_case`, and in less time where it shows the defect and the repair.

    First the case runs in copies of two processes that have imported upstream, one without overlays and one with every overlay. In a copy
    the case cannot see the effects of an import, so the result counts only where upstream is broken and the seams repair it.
    """
    return _confirmed_in_copies(job, case, transcript) or run_case(job, case, transcript)


def _confirmed_in_copies(job: Job, case: Case, transcript: Transcript) -> tuple[Conclusion, ...]:
    """Return the conclusions of a case in copies of processes that have imported upstream; empty where they do not count."""
    if case.device != CPU or case.environment or case.crash_is_broken or _is_preloaded(job, case):
        return ()
    switches = _switches(inventory.parts_of(case, job.overlays))
    armed = () if switches else (megacpp_overlays.__name__, *job.loaded)
    lines: list[str] = []
    shown = Transcript([], lines.append)
    shown.say(f"case {case.name} (overlay {case.overlay}): {case.device}, upstream is imported before")
    with tempfile.TemporaryDirectory(prefix="repro-") as folder:
        process = _Process(job, case, Path(folder), shown)
        process.prepare(armed)
        alone = process.run({MODE: Mode.OFF.value}, loaded=job.loaded)
        if alone.kind is not RunKind.BROKEN:
            return ()
        shown.say(f"  upstream alone: {_in_words(alone)}")
        with_all = process.run(switches, loaded=armed)
        shown.say(f"  with every overlay: {_in_words(with_all)}")
    if _shows_failure(found := judge.judge(alone, with_all)):
        return ()
    said = len(lines)
    if _shows_failure(failures := _neighbours(job, case, alone, with_all, shown)):
        del lines[said:]
        # Other overlays may change a neighbour. Then both sides of the comparison run with them.
        failures = _neighbours(job, case, without_case(job, case, shown), with_all, shown)
    if _shows_failure(failures):
        return ()
    for line in lines:
        transcript.say(line)
    return (*found, *failures)


def _is_preloaded(job: Job, case: Case) -> bool:
    """Return whether a fork server may have imported a target of a case before the case runs."""
    return any(part.target.distribution in forked.PRELOADED for part in inventory.parts_of(case, job.overlays))


def _switches(parts: Sequence[Erratum]) -> dict[str, str]:
    """Return the environment variables that switch on the parts that are off by default."""
    return {part.variable: Switch.ON.value for part in parts if part.off_by_default}


def _shows_failure(found: Sequence[Conclusion]) -> bool:
    return any(each.sentinel is Sentinel.FAILED for each in found)


def _neighbours(job: Job, case: Case, without: Run, with_all: Run, transcript: Transcript) -> tuple[Conclusion, ...]:
    """Write the results of a case's neighbours to the transcript; return a failure for each that differs with every overlay."""
    failures: list[Conclusion] = []
    cases = inventory.load_cases(job.reproducer)
    for each in neighbour.of(case, cases, job.reproducer.parent):
        stock = without.beside.get(each.name)
        if (problem := neighbour.problem(each, stock, with_all.beside.get(each.name))) is not None:
            failures.append(Conclusion(Sentinel.FAILED, problem))
        elif stock is None or stock.numbers is None:
            transcript.say(f"  neighbour {each.name}: not measured: {stock.why_not if stock else ''}")
        else:
            same = "the same bits" if not each.rounding else f"the same but for rounding ({each.why_rounding})"
            transcript.say(f"  neighbour {each.name}: {same}, {sum(map(len, stock.numbers.values()))} numbers")
    return tuple(failures)


def witness_case(job: Job, case: Case, transcript: Transcript) -> Run:
    """Run one case of a job with every overlay off, and record the sources of each part that were read and loaded."""
    transcript.say(f"case {case.name} (overlay {case.overlay}): {case.device}")
    with tempfile.TemporaryDirectory(prefix="repro-") as folder:
        process = _Process(job, case, Path(folder), transcript)
        if not can_run(case):
            return Run(kind=RunKind.BLOCKED, seen=NO_DEVICE, parts=())
        alone = process.run({MODE: Mode.OFF.value}, options=["--witness"])
    transcript.say(f"  upstream alone: {_in_words(alone)}")
    return alone


def without_case(job: Job, case: Case, transcript: Transcript) -> Run:
    """Run one case of a job with every overlay but its own."""
    with tempfile.TemporaryDirectory(prefix="repro-") as folder:
        found = _Process(job, case, Path(folder), transcript).run({DISABLE: str(case.overlay)})
    transcript.say(f"  with the other overlays alone: {_in_words(found)}")
    return found


def trial_case(job: Job, case: Case, shapes: Mapping[str, str], transcript: Transcript) -> Run:
    """Run one case of a job with every overlay, and with the seams of shapes that no probe recognised.

    Args:
        job: the job of the case.
        case: a case that was broken or sound without overlays.
        shapes: shape by target module of the overlay's parts.
        transcript: gets a line.
    """
    parts = inventory.parts_of(case, job.overlays)
    with tempfile.TemporaryDirectory(prefix="repro-") as folder:
        process = _Process(job, case, Path(folder), transcript)
        found = process.run(_switches(parts), options=[f"--try={json.dumps(dict(shapes))}"])
    transcript.say(f"  with the seams of {', '.join(shapes.values()) or 'the recognised shapes'}: {_in_words(found)}")
    return found


def _show_probe(run: Run, transcript: Transcript) -> None:
    for part in run.parts:
        shape = f", shape {part.shape}" if part.shape else ""
        transcript.say(f"  probe of {part.module}: {part.verdict.value}{shape}: {part.evidence}")


def _in_words(run: Run) -> str:
    words = {RunKind.SOUND: "not broken"}.get(run.kind, run.kind.value)
    decisions = ", ".join(dict.fromkeys(part.decision.value for part in run.parts if part.decision))
    return f"{words}: {run.seen}" + (f" [overlay: {decisions}]" if decisions else "")


class _Process:
    """Runner of one case in fresh processes."""

    def __init__(self, job: Job, case: Case, folder: Path, transcript: Transcript) -> None:
        self._job = job
        self._case = case
        self._folder = folder
        self._transcript = transcript

    def run(self, variables: Mapping[str, str], *, options: Sequence[str] = (), loaded: Sequence[str] = ()) -> Run:
        """Run the case once, with variables added to its environment, and return the result."""
        # A folder of its own: `-m` puts it on the path, and files that upstream writes are deleted with it.
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        report, output = folder / "report", folder / "output"
        words = ["megacpp_overlays.repro.child", str(self._job.reproducer.resolve()), self._case.name, str(report)]
        copies = None if _PROBE_ONLY in options else self._job.servers  # a probe imports no torch
        bare = _is_preloaded(self._job, self._case)
        run_module = functools.partial(copies.run, loaded=loaded, bare=bare) if copies else forked.run_anew
        ended = run_module(
            [*words, *options],
            folder=folder,
            environment={**self._environment(), **variables},
            output=output,
            timeout=self._job.timeout,
        )
        lines = output.read_text(errors="replace").splitlines()
        run = self._without_names(self._read(report, ended, lines, probe_only=_PROBE_ONLY in options))
        if len(lines) > _MOST:
            self._transcript.note(f"    | ({len(lines) - _MOST} lines before this one were left out)")
        for before_last, line in zip(range(len(lines) - 1, -1, -1), lines, strict=True):
            if before_last < _MOST:
                self._transcript.note(f"    | {line}", show=run.kind is RunKind.FAILED and before_last < _TAIL)
        return run

    def prepare(self, loaded: Sequence[str]) -> None:
        """Start the fork server with these modules before its first copy is needed."""
        if self._job.servers is not None:
            self._job.servers.prepare(environment=self._environment(), loaded=loaded)

    def _without_names(self, run: Run) -> Run:
        clean = self._transcript.clean
        parts = (
            replace(
                part,
                evidence=clean(part.evidence),
                reason=clean(part.reason),
                difference=clean(part.difference) if part.difference is not None else None,
            )
            for part in run.parts
        )
        return replace(run, seen=clean(run.seen), parts=tuple(parts))

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not variables.is_ours(name)}
        kept |= {name: os.environ[name] for name in (PLUGINS, WITNESSES) if name in os.environ}
        path = [str(self._job.tree.resolve())] if self._job.tree else []
        path += [str(Path(entry).resolve()) for entry in kept.get("PYTHONPATH", "").split(os.pathsep) if entry]
        root = Path(str(megacpp_overlays.__file__)).resolve().parent.parent
        if root not in {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}:
            path.append(str(root))
        kept |= {LOG: "stderr", variables.SMALL_CALLS.name: "overlay"}  # problems of reproducers are small
        if self._job.servers is not None:
            kept[variables.LOG_LEVEL.name] = "warning"  # each rank would look for its model before its first step
        if self._case.device == CPU:
            kept |= forked.NO_GPU  # its ranks are forked, and a fork has no GPU that its parent has used
            if self._job.servers is not None:
                kept.setdefault("OMP_NUM_THREADS", "1")  # as many cases run at once as there are cores
        return {**kept, "PYTHONPATH": os.pathsep.join(path), **self._case.environment}

    def _read(self, report: Path, ended: str | None, output: Sequence[str], *, probe_only: bool) -> Run:
        """Return the run that the report of a process and its way of ending describe."""
        facts = _facts(report)
        parts = _parts(facts)
        if problem := _wrong_code(facts, self._job.tree):
            return Run(kind=RunKind.FAILED, seen=problem, parts=parts)
        if ended is not None:
            last = next((line for line in reversed(output) if line.strip()), "no output")
            died = "running" in facts and "result" not in facts
            kind = RunKind.BROKEN if died and self._case.crash_is_broken else RunKind.FAILED
            return Run(kind=kind, seen=f"the process {ended}: {last}", parts=parts)
        if probe_only:
            return Run(kind=RunKind.BLOCKED, seen="only probed", parts=parts)
        result = facts.get("result")
        if result is None:
            return Run(kind=RunKind.FAILED, seen="the process ended without an answer", parts=parts)
        return Run(kind=RunKind(result["kind"]), seen=result["seen"], parts=parts, beside=_beside(facts))


def _facts(report: Path) -> dict[str, Any]:
    """Return the events of a report by name; the last line may be torn."""
    facts: dict[str, Any] = {}
    for line in report.read_text().splitlines() if report.exists() else ():
        with contextlib.suppress(ValueError):
            event = json_text.parse(line)
            facts[event["event"]] = event
    return facts


def _beside(facts: Mapping[str, Any]) -> dict[str, neighbour.NeighbourResult]:
    """Return the results of neighbours, by name."""
    return {
        event["name"]: neighbour.NeighbourResult(
            numbers=event["numbers"], why_not=event["why_not"], failed=event["failed"]
        )
        for name, event in facts.items()
        if name.startswith("beside ")
    }


def _parts(facts: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts of the overlay. The targets of a regression guard have no verdict, and are left out."""
    settled = {part["module"]: part for part in facts.get("settled", {}).get("parts", ())}
    found = []
    for part in facts.get("probed", {}).get("parts", ()):
        if "verdict" not in part:
            continue
        outcome = settled.get(part["module"])
        found.append(
            Part(
                module=part["module"],
                verdict=Verdict(part["verdict"]),
                shape=part["shape"],
                evidence=part["evidence"],
                decision=Decision(outcome["decision"]) if outcome else None,
                reason=outcome["reason"] if outcome else "",
                looks_repaired=part.get("looks_repaired", False),
                sources=outcome.get("sources") if outcome else None,
                difference=outcome.get("difference") if outcome else None,
            )
        )
    return tuple(found)


def _wrong_code(facts: Mapping[str, Any], tree: Path | None) -> str | None:
    """Describe how the probed source, the loaded source and the requested tree differ; None where they agree."""
    probed = {part["module"]: part for part in facts.get("probed", {}).get("parts", ())}
    for loaded in facts.get("settled", {}).get("parts", ()):
        name = loaded["module"]
        if "sha256" in loaded and loaded["sha256"] != probed[name]["sha256"]:
            return f"{name}: the probe read {probed[name]['file']}, and {loaded['file']} was loaded"
    for name, part in probed.items():
        # The package is checked, too: a part that is absent has no file, and it must be absent from the tree.
        for file in (part["package"], part["file"]):
            if file and tree and (tree / name.partition(".")[0]).is_dir() and not _is_below(Path(file), tree):
                return f"{name} does not come from --tree: {file}"
            if file and not tree and trees.stand_in_of(Path(file)):
                return f"{name} comes from a stand-in, which must be given with --tree: {file}"
    return None


def _is_below(file: Path, tree: Path) -> bool:
    # A package folder of the tree may be a link; the process reports the file by its name in the tree.
    return any(path.is_relative_to(tree.resolve()) for path in (file, file.resolve()))
