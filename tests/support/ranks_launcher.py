"""Launcher for one rank: `ranks_launcher.py PLAN.json FOLDER`. It runs the plan and leaves a report of its calls.

The plan has an entry `all` and one for each rank that is to differ:

    environment   variables of ours, set before the package is imported
    path          folders put first on sys.path
    first         modules imported before the package
    before        modules imported after it, before the process group is made
    leaves        "exit", "kill" or "stop": the way in which the rank ends or stops itself once it is in the process group
    calls         how often verify_ranks is called
    after         a rank that must have left before the first call
    until         a file that must be there before the first call
    timeouts      of each call, where they are not all `timeout`
    group         ranks of the subgroup to compare, instead of the whole world

and next to these entries `timeout`; `expected`, how many ranks will leave a report; and, where they are not the usual ones, `backend`,
`init_method`, `patience`, seconds for a store that is silent, `grace`, seconds for the rank that judges, and `reduces`, whether the ranks add
up a tensor on their GPUs when they have agreed.

No host is too slow for a plan: ranks leave when all have joined, and the timeout of a call begins when all ranks that will
make that call have arrived.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PATIENCE_S = 3600.0


def main() -> None:
    rank = os.environ["RANK"]
    plan: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(sys.argv[2])
    mine = {**plan["all"], **plan.get(rank, {})}
    os.environ.update(mine.get("environment", {}))
    sys.path[:0] = mine.get("path", [])
    for name in mine.get("first", []):
        importlib.import_module(name)

    import megacpp_overlays
    from megacpp_overlays.processes import rank_exchange, ranks

    ranks.PATIENCE_S = plan.get("patience", PATIENCE_S)
    rank_exchange.GRACE_S = rank_exchange.LINGER_S = plan.get("grace", PATIENCE_S)
    clock = HeldClock(folder, int(rank), plan)
    rank_exchange.SystemClock.now = lambda _: clock.now()  # type: ignore[method-assign]
    for name in mine.get("before", []):
        importlib.import_module(name)
    import torch.distributed as dist

    place = {"rank": int(rank), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group(plan.get("backend", "gloo"), init_method=plan.get("init_method", "env://"), **place)
    (folder / f"{rank}.joined").write_text(str(os.getpid()))
    if "leaves" in mine:
        wait(lambda: len(list(folder.glob("*.joined"))) == place["world_size"])
        leave(mine["leaves"])
    group = dist.new_group(mine["group"]) if "group" in mine else None
    if "after" in mine:
        wait(lambda: has_left(folder / f"{mine['after']}.joined"))
    if "until" in mine:
        wait((folder / mine["until"]).exists)
    calls = mine.get("calls", 1)
    seen = []
    for number, timeout in enumerate(mine.get("timeouts", calls * [plan["timeout"]]), 1):
        clock.hold()
        seen.append(call(megacpp_overlays, group, timeout))
        (folder / f"{rank}.{number}.ended").touch()
    if plan.get("reduces"):
        seen[-1]["sum"] = all_reduced()
    leave_word(folder, rank, seen)
    # An agent may end its other ranks when one is done, so each rank stays until all have left their reports.
    wait(lambda: len(list(folder.glob("*.json"))) >= plan["expected"])


class HeldClock:
    """Clock that is stopped until all ranks that make a call have arrived in the store."""

    def __init__(self, folder: Path, rank: int, plan: dict[str, Any]) -> None:
        self._folder, self._rank, self._plan = folder, rank, plan
        self._call = 0

    def hold(self) -> None:
        """Stop the clock for the next call."""
        self._call += 1
        self._asked = 0
        self._since: float | None = None

    def now(self) -> float:
        """Return seconds since all have arrived."""
        if self._since is None:
            self._asked += 1
            if self._asked > 1:  # the first question is for the time of the arrival
                self._mark(self._rank).touch()
            if not all(self._mark(rank).exists() for rank in self._present()):
                return 0.0
            self._since = time.monotonic()
        return time.monotonic() - self._since

    def _mark(self, rank: int) -> Path:
        return self._folder / f"{rank}.{self._call}.arrived"

    def _present(self) -> list[int]:
        members: Sequence[int] = self._mine(self._rank).get("group", range(int(os.environ["WORLD_SIZE"])))
        plans = {rank: self._mine(rank) for rank in members}
        return [rank for rank, mine in plans.items() if "leaves" not in mine and mine.get("calls", 1) >= self._call]

    def _mine(self, rank: int) -> dict[str, Any]:
        return {**self._plan["all"], **self._plan.get(str(rank), {})}


def wait(come: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not come() and time.monotonic() < until:
        time.sleep(0.05)


def has_left(joined: Path) -> bool:
    pid = joined.read_text() if joined.exists() else ""
    if not pid:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "TZX"


def leave(how: str) -> None:
    if how == "exit":
        os._exit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


def call(package: Any, group: Any, timeout: float) -> dict[str, Any]:
    import torch

    start = time.perf_counter()
    seen: dict[str, Any]
    try:
        audit = package.verify_ranks(group, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        found = getattr(error, "differences", ())
        seen = {
            "outcome": type(error).__name__,
            "text": str(error),
            "missing": list(getattr(error, "missing", ())),
            "differences": [[each.subject, each.field, each.values] for each in found],
        }
    else:
        seen = {"outcome": "agreed", "fingerprint": audit.fingerprint}
    return {**seen, "seconds": time.perf_counter() - start, "cuda": torch.cuda.is_initialized()}


def all_reduced() -> float:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    one = torch.ones(1, device="cuda")
    dist.all_reduce(one)
    total: float = one.item()
    return total


def leave_word(folder: Path, rank: str, seen: list[dict[str, Any]]) -> None:
    unfinished = folder / f"{rank}.unfinished"
    unfinished.write_text(json.dumps(seen))
    unfinished.rename(folder / f"{rank}.json")


if __name__ == "__main__":
    main()
