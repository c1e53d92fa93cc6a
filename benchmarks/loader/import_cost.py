"""Cost of importing this package against other packages that work at import, and of overlays at the import of their targets.

    make bench                                     in the lane that has all of them, and writes import_cost.md
    python benchmarks/loader/import_cost.py               in any environment; packages that are not installed are left out

Every number is the median of fresh processes. Rounds take the statements in turn, so that a slow moment of the host
hits all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megacpp_overlays.loader import registry
from megacpp_overlays.source.trees import InstalledTree

RESULT = Path(__file__).resolve().parents[1] / "results" / "import_cost.md"
NEUTRAL = RESULT.parent.resolve()
"""Working directory of the measured processes: in the checkout they would import it, not the installed package."""

OVER_WRAPT_MS = 25
PROBES_MS = 150

BARE = "pass"
WRAPT = "import wrapt"
OURS = "import megacpp_overlays"
OTHERS = ("import opentelemetry.instrumentation.auto_instrumentation", "import ddtrace.auto")
VERSIONS = (
    "wrapt", "importlib-metadata", "opentelemetry-instrumentation", "ddtrace", "torch", "megatron-core", "liger-kernel",
)  # fmt: skip

# ddtrace would talk to an agent; that is no cost of importing it.
QUIET = {"DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false", "MEGACPP_OVERLAYS_LOG": "logging"}
# Without bytecode on disk each process would compile its imports, and coverage would trace them: neither is our cost.
NOT_OURS = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")

SETTLE = """
import importlib, json, sys, time
import megacpp_overlays
from megacpp_overlays.loader import aliases, known, probing, session

targets = sys.argv[1:]
spent = {"probe": 0.0, "sweep": 0.0, "settle": 0.0, "all hooks": 0.0}
settling = []  # importing one target can import others, whose hooks are not part of a row of its own

def timed(function, keys):
    def call(*args, **kwargs):
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            for key in keys():
                spent[key] += time.perf_counter() - start
    return call

def of_target(key):
    return lambda: [key] if settling and settling[-1] in targets else []

def loaded(self, name, module, **kwargs):
    settling.append(name)
    keys = (["settle"] if name in targets else []) + (["all hooks"] if len(settling) == 1 else [])
    try:
        return timed(original, lambda: keys)(self, name, module, **kwargs)
    finally:
        settling.pop()

probing.examine = timed(probing.examine, of_target("probe"))
known.finding = timed(known.finding, of_target("probe"))
aliases.rebind = timed(aliases.rebind, of_target("sweep"))
original, session.Session.loaded = session.Session.loaded, loaded

start = time.perf_counter()
import torch
spent["torch"] = time.perf_counter() - start
start = time.perf_counter()
for name in targets:
    importlib.import_module(name)
spent["import"] = time.perf_counter() - start - spent["all hooks"]
spent["modules"] = len(sys.modules)
spent["decisions"] = [f"{r.overlay.id}: {r.decision.value}" for r in megacpp_overlays.audit().records
                      if r.overlay.target.module in targets]
print(json.dumps(spent))
"""


@dataclass(frozen=True)
class ImportCost:
    """Cost and decisions of the overlays of one target at its import. Times are medians, in milliseconds."""

    target: str
    decisions: tuple[str, ...]
    modules: int
    torch: float
    imported: float
    probe: float
    sweep: float
    settle: float


def environment() -> dict[str, str]:
    """Return the environment of every measured process."""
    return {name: value for name, value in os.environ.items() if name not in NOT_OURS} | QUIET


@dataclass(frozen=True)
class Cost:
    """Times of processes, in milliseconds: the medians of processor time and wall clock, and the least of the latter."""

    cpu: float
    wall: float
    least: float


def process(code: str) -> tuple[float, float]:
    """Run one statement in a fresh interpreter; return its processor time and wall clock in milliseconds."""
    start = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(),
        cwd=NEUTRAL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(child.pid, 0)
    wall = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{code!r} exits {child.returncode}")
    return (used.ru_utime + used.ru_stime) * 1000, wall * 1000


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keep this process and those that it starts on one core: after a move between cores caches are cold."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(usual)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, usual)


def starts(rounds: int, statements: Sequence[str]) -> dict[str, Cost]:
    """Return the cost of each statement."""
    for code in statements:
        process(code)  # the first run compiles bytecode and fills the file cache
    runs: dict[str, list[tuple[float, float]]] = {code: [] for code in statements}
    for _ in range(rounds):
        for code, taken in runs.items():
            taken.append(process(code))
    costs = {}
    for code, taken in runs.items():
        cpu, wall = zip(*taken, strict=True)
        costs[code] = Cost(statistics.median(cpu), statistics.median(wall), min(wall))
    return costs


def settle_once(*targets: str) -> dict[str, Any]:
    """Import targets in a fresh process with the overlays armed; return the seconds that each part took."""
    command = [sys.executable, "-W", "ignore", "-c", SETTLE, *targets]
    done = subprocess.run(command, env=environment(), cwd=NEUTRAL, capture_output=True, text=True, check=True)
    seconds: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def settled(target: str, rounds: int) -> ImportCost:
    """Return the medians of one target."""
    settle_once(target)  # the first run compiles bytecode and fills the file cache
    runs = [settle_once(target) for _ in range(rounds)]

    def median(key: str) -> float:
        return float(statistics.median(run[key] for run in runs)) * 1000

    return ImportCost(
        target=target,
        decisions=tuple(runs[0]["decisions"]),
        modules=runs[0]["modules"],
        torch=median("torch"),
        imported=median("import"),
        probe=median("probe"),
        sweep=median("sweep"),
        settle=median("settle"),
    )


def host() -> str:
    """Return processor, cores, system and Python in one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return (
        f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
    )


def versions() -> str:
    """Return the versions of everything that is measured and installed here."""
    found = importlib.metadata.distributions()
    installed = {dist.name.lower().replace("_", "-"): dist.version for dist in found}
    return ", ".join(f"{name} {installed.get(name, 'not installed')}" for name in VERSIONS)


def budget(value: float, limit: float) -> str:
    """Return the words for a value and its limit."""
    return f"{value:.1f} ms of {limit} ms, {'within' if value <= limit else 'OVER'}"


def starts_table(costs: dict[str, Cost], rounds: int) -> str:
    """Return the table of process times."""
    bare, wrapt, ours = costs[BARE], costs[WRAPT], costs[OURS]
    rows = [
        f"| `{code}` | {cost.cpu:.1f} | {cost.cpu - bare.cpu:+.1f} | {cost.cpu - wrapt.cpu:+.1f} "
        f"| {cost.wall:.1f} | {cost.wall - wrapt.wall:+.1f} | {cost.least:.1f} | {cost.least - bare.least:+.1f} "
        f"| {cost.least - wrapt.least:+.1f} |"
        for code, cost in costs.items()
    ]
    return "\n".join(
        [
            "## Start of an interpreter",
            "",
            "A whole process that runs one statement, in milliseconds. The least wall clock is the one that other work",
            f"on the host disturbed least. {rounds} rounds, all on one core.",
            "",
            "| statement | median CPU | over bare | over wrapt | median wall | over wrapt | least wall | over bare "
            "| over wrapt |",
            "|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"Budget, megacpp_overlays over wrapt: {budget(ours.least - wrapt.least, OVER_WRAPT_MS)}, by least wall clock; "
            f"{budget(ours.cpu - wrapt.cpu, OVER_WRAPT_MS)}, by median CPU time.",
        ]
    )


def targets_table(all_settled: list[ImportCost], rounds: int) -> str:
    """Return the table of the cost that the hooks add to their targets."""
    rows = [
        f"| `{s.target}` | {', '.join(s.decisions)} | {s.torch:.0f} | {s.imported:.0f} | {s.probe:.1f} | {s.sweep:.1f} "
        f"| {s.settle:.1f} | {s.settle / s.imported:.1%} | {s.settle / (s.imported + s.torch):.1%} | {s.modules} |"
        for s in all_settled
    ]
    return "\n".join(
        [
            "## Import of the targets",
            "",
            "`settle` is all that happens in the hook: probe, witness, seams, alias sweep, self-test, record. Torch is",
            f"imported first and timed apart; `target` is the import without the hook. {rounds} rounds.",
            "",
            "| target | decision | torch ms | target ms | probe ms | sweep ms | settle ms | settle/target "
            "| settle/(target+torch) | modules loaded |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *rows,
        ]
    )


def launcher_text(targets: Sequence[str], rounds: int) -> str:
    """Return the cost of one process that imports all targets in turn, as a launcher of a large model does."""
    settle_once(*targets)
    runs = [settle_once(*targets) for _ in range(rounds)]
    torch, imported, probes, hooks = (
        statistics.median(run[key] for run in runs) * 1000 for key in ("torch", "import", "probe", "all hooks")
    )
    return "\n".join(
        [
            "## A launcher that imports all of them",
            "",
            f"One process, in turn; the findings of probes about these releases are recorded. {rounds} rounds. Torch takes {torch:.0f} ms and the",
            f"targets {imported:.0f} ms. All hooks together take {hooks:.1f} ms, {hooks / (torch + imported):.1%} of both.",
            "",
            f"Budget, all probes together: {budget(probes, PROBES_MS)}.",
        ]
    )


def main() -> None:
    """Measure, print, and keep the result if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="processes for each statement")
    parser.add_argument("--target-rounds", type=int, default=3, help="processes for each target")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    chosen = parser.parse_args()

    print("== start of an interpreter", file=sys.stderr, flush=True)
    able = [code for code in OTHERS if importlib.util.find_spec(code.split()[1].split(".")[0]) is not None]
    with one_core():
        parts = [starts_table(starts(chosen.rounds, [BARE, WRAPT, OURS, *able]), chosen.rounds)]
    all_settled = []
    overlays = registry.load()
    for target in sorted({overlay.target.module for overlay in overlays}):
        if InstalledTree().module(target) is not None:
            print(f"== import of {target}", file=sys.stderr, flush=True)
            all_settled.append(settled(target, chosen.target_rounds))
    if all_settled:
        parts.append(targets_table(all_settled, chosen.target_rounds))
        print("== a launcher that imports all of them", file=sys.stderr, flush=True)
        parts.append(launcher_text([each.target for each in all_settled], chosen.target_rounds))
    head = "\n".join(
        [
            "# Import cost",
            "",
            "Written by `make bench`. Medians of fresh processes on a host that other work shares: compare the rows of",
            "one table, not tables of two hosts.",
            "",
            f"- Date: {datetime.now(tz=timezone.utc):%Y-%m-%d}",
            f"- Host: {host()}",
            f"- Versions: {versions()}",
        ]
    )
    text = "\n\n".join([head, *parts]) + "\n"
    print(text)
    if chosen.write:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
