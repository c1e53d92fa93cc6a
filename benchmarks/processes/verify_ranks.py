"""Cost of verifying that all ranks run the same code.

    python benchmarks/processes/verify_ranks.py --write        measures, and writes verify_ranks.md

Three ways, from real to large: processes under torchrun on this host; ranks that a few processes play against a real
TCPStore; and the exchange alone over a dictionary, which counts questions and bytes.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import heapq
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import megacpp_overlays
from megacpp_overlays.loader import statement
from megacpp_overlays.loader.session import current
from megacpp_overlays.processes import rank_exchange, ranks
from megacpp_overlays.processes.rank_exchange import Exchange, SystemClock
from megacpp_overlays.source.trees import InstalledTree

RESULT = Path(__file__).resolve().parents[1] / "results" / "verify_ranks.md"
WORLDS = (2, 4, 8)
SIMULATED = (1024, 4096, 16_384)
COUNTED = (2, 8, 1024, 16_384)
ROUNDS = 15
PLAYERS = 4
TIMEOUT = 120.0
QUIET = {"MEGACPP_OVERLAYS_LOG": "logging", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def told_here() -> statement.Statement:
    """Return the statement of this process."""
    session = current()
    return statement.of(session.audit(), InstalledTree())


def with_one_off(stated: statement.Statement) -> statement.Statement:
    """Return the statement of a process that is the same, but for one overlay that is off."""
    return {**stated, "off": [stated["decisions"][0]["id"]]}


# Real processes.


def one_rank() -> None:
    """Measure on one rank under torchrun; the first prints the slowest rank of each round, in milliseconds."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    stated = told_here()
    odd = with_one_off(stated) if rank == size - 1 else stated

    def disagree() -> None:
        meeting = ranks._meeting(None)  # noqa: SLF001
        if meeting is None or ranks._run(meeting, statement.digest(odd), odd, TIMEOUT).agreed:  # noqa: SLF001
            raise RuntimeError("it does not notice")

    everything: list[Any] = [None] * size
    actions: dict[str, Callable[[], Any]] = {
        "first": megacpp_overlays.verify_ranks,
        "agree": megacpp_overlays.verify_ranks,
        "differ": disagree,
        "barrier": dist.barrier,
        "gather": lambda: dist.all_gather_object(everything, stated),
        "statement": told_here,
    }
    slowest: dict[str, float] = {}
    for name, action in actions.items():
        rounds = []
        for _ in range(1 if name == "first" else ROUNDS):
            dist.barrier()
            start = time.perf_counter()
            action()
            mine: list[Any] = [None] * size
            taken = time.perf_counter() - start
            dist.all_gather_object(mine, taken)
            rounds.append(max(mine))
        slowest[name] = statistics.median(rounds) * 1000
    if rank == 0:
        print(json.dumps(slowest), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def real(size: int) -> dict[str, float]:
    """Return the measurements of torchrun with so many ranks."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command = [*agent, str(Path(__file__).resolve()), "--rank"]
    done = subprocess.run(command, env=os.environ | QUIET, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    found: dict[str, float] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


# Many ranks in a few processes.


def play(parts: Mapping[int, tuple[Exchange, statement.Statement]], clock: Any) -> Iterator[bool]:
    """Play some ranks, each step when it is due; yield whether each got the answer that all agree."""
    digests = {id(stated): statement.digest(stated) for _, stated in parts.values()}
    running = {rank: part.steps(digests[id(stated)], stated, clock) for rank, (part, stated) in parts.items()}
    queue = [(clock.now(), rank) for rank in running]
    heapq.heapify(queue)
    while queue:
        due, rank = heapq.heappop(queue)
        clock.sleep(max(due - clock.now(), 0))
        try:
            heapq.heappush(queue, (clock.now() + next(running[rank]), rank))
        except StopIteration as end:
            yield end.value.agreed


def player(port: int, number: int, size: int, odd: int, stated: statement.Statement, start: Any, results: Any) -> None:
    """Be one process with its own connection, which plays its share of the ranks."""
    from torch.distributed import TCPStore

    # In a world of real processes each rank unpacks one verdict; here one process would unpack thousands.
    rank_exchange.decode = functools.cache(rank_exchange.decode)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    world = tuple(range(size))
    off = with_one_off(stated)
    parts = {
        rank: (Exchange(store, f"world/{size}/{odd}", world, rank, TIMEOUT), off if rank == odd else stated)
        for rank in range(number, size, PLAYERS)
    }
    start.wait()
    began = time.monotonic()
    answers = list(play(parts, SystemClock()))
    results.put((began, time.monotonic(), all(answers), any(answers)))


def simulated(size: int, odd: int, stated: statement.Statement) -> float:
    """Return the seconds from the first question to the last answer."""
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(PLAYERS), context.Queue()
    arguments = (server.port, size, odd, stated, start, results)
    players = [context.Process(target=player, args=(arguments[0], number, *arguments[1:])) for number in range(PLAYERS)]
    for each in players:
        each.start()
    found = [results.get(timeout=60) for _ in players]
    for each in players:
        each.join()
    agreed = all(each[2] for each in found) if odd < 0 else not any(each[3] for each in found)
    if not agreed:
        raise RuntimeError("the answer does not fit the ranks that were played")
    return max(each[1] for each in found) - min(each[0] for each in found)


# Questions and bytes.


class CountingDictionary:
    """A dictionary that counts questions, and the bytes of keys and values in both directions."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        self.sent = 0
        self.most = 0

    def _count(self, name: str, *parts: str | bytes) -> None:
        self.asked[name] += 1
        self.sent += sum(map(len, parts))

    def set(self, key: str, value: str) -> None:
        """Leave a value."""
        self._count("set", key, value)
        self.held[key] = value.encode()
        self.most = max(self.most, len(self.held))

    def get(self, key: str) -> bytes:
        """Return a value."""
        self._count("get", key, self.held[key])
        return self.held[key]

    def add(self, key: str, value: int) -> int:
        """Add to a counter."""
        total = int(self.held.get(key, b"0")) + value
        self._count("add", key, b"12345678", b"12345678")
        self.held[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        self._count("check", *keys, b"1")
        return all(key in self.held for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return several values."""
        values = [self.held[key] for key in keys]
        self._count("multi_get", *keys, *values)
        return values

    def delete_key(self, key: str) -> bool:
        """Forget a value."""
        self._count("delete", key, b"1")
        return self.held.pop(key, None) is not None


class Virtual:
    """A virtual clock: sleeping advances it at once."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        """Return the virtual time."""
        return self.seconds

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.seconds += seconds


def counted(size: int, odd: int, stated: statement.Statement) -> dict[str, float]:
    """Return the questions and bytes of the exchange when all ranks arrive at once."""
    store, world, off = CountingDictionary(), tuple(range(size)), with_one_off(stated)
    prefix = f"megacpp_overlays/ranks/{'0' * 16}"
    parts = {rank: (Exchange(store, prefix, world, rank, TIMEOUT), off if rank == odd else stated) for rank in world}
    kept, rank_exchange.decode = rank_exchange.decode, functools.cache(rank_exchange.decode)
    try:
        answers = list(play(parts, Virtual()))
    finally:
        rank_exchange.decode = kept
    if any(answers) != (odd < 0):
        raise RuntimeError("the answer does not fit the ranks that were played")
    asked = sum(store.asked.values())
    return {"each": asked / size, "bytes": store.sent / size, "all": store.sent, "held": store.most}


# The page.


def page() -> str:
    """Measure everything and return it as a page."""
    import torch

    stated = told_here()
    size = len(json.dumps(stated))
    packed = len(rank_exchange.encode(stated))
    lines = [
        "# Asking all ranks whether they run the same code",
        "",
        "Written by `benchmarks/processes/verify_ranks.py --write`. All processes of a row run on this one host at once: read the",
        "rows of a table against each other, not as times of a cluster.",
        "",
        f"- Date: {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
        f"- Host: {os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}",
        f"- Versions: torch {torch.__version__}, megacpp_overlays {megacpp_overlays.__version__}",
        f"- Statement of a rank: {len(stated['decisions'])} decisions, {size} bytes as JSON, {packed} as it is sent",
        "",
        "## Real processes under torchrun, gloo",
        "",
        f"Milliseconds until the slowest rank is through: the median of {ROUNDS} rounds that begin at a barrier. `first` is",
        "the first call of a process, with its imports. `one differs` is the exchange alone, without the statement and the",
        "audit that `agree` includes. The last three columns are for comparison: a barrier, gathering every",
        "rank's statement on every rank with `all_gather_object`, and the time of a call for the statement alone.",
        "",
        "| ranks | first | agree | one differs | barrier | all_gather_object | statement |",
        "|---|---|---|---|---|---|---|",
    ]
    for world in WORLDS:
        print(f"== torchrun with {world} ranks", file=sys.stderr, flush=True)
        row = real(world)
        names = ("first", "agree", "differ", "barrier", "gather", "statement")
        lines.append(f"| {world} | {' | '.join(f'{row[name]:.1f}' for name in names)} |")
    lines += [
        "",
        "## Many ranks against a real TCPStore",
        "",
        f"Seconds from the first question to the last answer. {PLAYERS} processes play all ranks over a connection each, and",
        "the store is a fifth process on the same host; on a cluster every rank is its own process, and the store alone is",
        "the bottleneck. All ranks arrive at once.",
        "",
        "| ranks | agree | one differs | agree, microseconds a rank |",
        "|---|---|---|---|",
    ]
    for world in SIMULATED:
        print(f"== {world} ranks against a TCPStore", file=sys.stderr, flush=True)
        agree, differ = simulated(world, -1, stated), simulated(world, world - 1, stated)
        lines.append(f"| {world} | {agree:.2f} | {differ:.2f} | {agree / world * 1e6:.0f} |")
    lines += [
        "",
        "## Questions and bytes",
        "",
        "Counted, not timed: the exchange over a dictionary, all ranks at once, bytes of keys and values in both directions",
        "(a TCPStore adds 8 bytes for each and one for the question). `most held` are the keys in the store at its fullest.",
        "",
        "| ranks | | questions a rank | bytes a rank | bytes at the store | most held |",
        "|---|---|---|---|---|---|",
    ]
    for world in COUNTED:
        print(f"== {world} ranks over a dictionary", file=sys.stderr, flush=True)
        for name, odd in (("agree", -1), ("one differs", world - 1)):
            row = counted(world, odd, stated)
            numbers = f"{row['each']:.1f} | {row['bytes']:.0f} | {row['all']:.0f} | {row['held']:.0f}"
            lines.append(f"| {world} | {name} | {numbers} |")
    lines += [
        "",
        "## The model",
        "",
        "With N ranks that arrive together, a rank asks about 8 times, the two questions whether the verdict is there included,",
        f"and once more for each pause that it waits for another rank. A pause is N / {rank_exchange.QUESTIONS_PER_S} s,",
        f"from {rank_exchange.LEAST_S * 1000:.0f} ms to {rank_exchange.MOST_S:.0f} s, and grows to twenty times that or "
        f"{rank_exchange.MOST_S:.0f} s, so all waiting ranks together ask at most about",
        f"{rank_exchange.QUESTIONS_PER_S} times a second. One statement is sent for each kind of rank, at most "
        f"{rank_exchange.MOST_STATEMENTS}; no rank ever reads another's. The leader",
        f"reads N digests of 32 bytes, {rank_exchange.BATCH} in one question. Everybody reads one verdict: less than 200 bytes when all",
        "agree; otherwise the table, with every rank number at most once.",
        "",
        "    time = the last arrival + 8 N / (questions a second that the store answers) + one pause",
        "",
        "Nothing in it grows faster than N at the store or at the leader, and nothing but the leader's digests grows at a rank.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and keep the result if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", action="store_true", help="be one rank under torchrun")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    chosen = parser.parse_args()
    if chosen.rank:
        one_rank()
        return
    text = page()
    print(text)
    if chosen.write:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
