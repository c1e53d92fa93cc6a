"""A launcher for one rank: `ranks_launcher.py PLAN.json FOLDER`. It does what the plan says and leaves what it saw.

The plan has an entry `all` and one for each rank that is to differ:

    environment   variables of ours, set before the package is imported
    path          folders put first on sys.path
    first         modules imported before the package
    before        modules imported after it, before the process group is made
    leaves        "exit", "kill" or "stop": what the rank does to itself once it is in the process group
    calls         how often verify_ranks is called
    delay         seconds before the first call
    group         ranks of the subgroup to compare, instead of the whole world

and beside them `timeout`; `expected`, how many ranks will leave word; and, where they are not the usual ones, `backend`,
`init_method` and `reduces`, whether the ranks add up a tensor on their GPUs when they have agreed.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
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

    # A test that shows what happens after them should not take a minute.
    rank_exchange.GRACE_S = rank_exchange.LINGER_S = ranks.PATIENCE_S = 2.0
    for name in mine.get("before", []):
        importlib.import_module(name)
    import torch.distributed as dist

    place = {"rank": int(rank), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group(plan.get("backend", "gloo"), init_method=plan.get("init_method", "env://"), **place)
    leave(mine.get("leaves"))
    group = dist.new_group(mine["group"]) if "group" in mine else None
    time.sleep(mine.get("delay", 0))
    seen = [call(megacpp_overlays, group, plan["timeout"]) for _ in range(mine.get("calls", 1))]
    if plan.get("reduces"):
        seen[-1]["sum"] = all_reduced()
    leave_word(folder, rank, seen)
    # An agent may end its other ranks when one is done, so nobody goes before all have said what they saw.
    until = time.monotonic() + PATIENCE_S
    while len(list(folder.glob("*.json"))) < plan["expected"] and time.monotonic() < until:
        time.sleep(0.05)


def leave(how: str | None) -> None:
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
