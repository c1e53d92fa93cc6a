"""Check, before step 1, that all ranks of a process group run the same code.

The ranks meet in the key-value store that `init_process_group` made, never in a collective: it is the same for gloo,
NCCL and every other backend, it touches no device and makes no communicator, and it lets us name who is missing, where a
collective would hang.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from megacpp_overlays import terminal_text
from megacpp_overlays.errors import RanksError
from megacpp_overlays.loader import statement
from megacpp_overlays.loader.audit import Audit
from megacpp_overlays.loader.session import Session
from megacpp_overlays.processes import differences, rank_exchange
from megacpp_overlays.processes.rank_exchange import Exchange, PayloadError, RanksVerdict, Store, SystemClock
from megacpp_overlays.source.trees import InstalledTree

TIMEOUT_S = 300.0
_LONGEST_S = 31 * 24 * 3600.0
PATIENCE_S = 15.0
"""Seconds that a store may take for one answer, in addition to the timeout and to the waits of the exchange itself."""
_POLL_S = 0.5


class _Rendezvous(NamedTuple):
    store: Store
    where: str
    """The store, for messages."""
    prefix: str
    ranks: tuple[int, ...]
    rank: int


def verify(session: Session, group: Any = None, timeout: float | timedelta = TIMEOUT_S) -> Audit:
    """Compare this rank with all others of a group; see `megacpp_overlays.verify_ranks`."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < seconds < _LONGEST_S:
        raise ValueError(f"timeout is {timeout}; it must be more than nothing and less than a month, in seconds")
    meeting = _meeting(group)
    audit = session.audit()
    if meeting is not None:
        own = statement.of(audit, InstalledTree())
        verdict = _run(meeting, statement.digest(own), own, seconds)
        if not verdict.agreed:
            missing = tuple(rank for rank, _ in verdict.missing)
            raise RanksError(report(verdict), differences=verdict.differences, missing=missing)
    session.log.count(audit)
    # Under `strict` a conflict is raised after the exchange, when all ranks know of it.
    audit.raise_if_strict()
    return audit


def initialized() -> Any:
    """Return torch.distributed where it is imported and has a process group, or None."""
    distributed = sys.modules.get("torch.distributed")
    is_ready = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if is_ready else None


def _meeting(group: Any) -> _Rendezvous | None:
    """Return the rendezvous of a group, or None where this rank has no other rank to compare with."""
    if (distributed := initialized()) is None:
        _refuse_if_launched(group)
        return None
    if group is None:
        group = distributed.group.WORLD
    if group is distributed.GroupMember.NON_GROUP_MEMBER or distributed.get_rank(group) < 0:
        return None  # as in a collective, which does nothing on a rank outside of the group
    # Other ranks of the fake backend do not exist.
    if distributed.get_world_size(group) == 1 or distributed.get_backend(group) == "fake":
        return None
    ranks = tuple(distributed.get_process_group_ranks(group))
    store = _store(distributed)
    name = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]
    prefix = f"megacpp_overlays/ranks/{name}{_attempt()}"
    return _Rendezvous(store, _in_words(store), prefix, ranks, distributed.get_rank())


def _attempt() -> str:
    """Return the part of a key that names the attempt of an elastic agent, empty where ranks have several agents.

    The agent keeps its store when it restarts ranks, so keys of a failed attempt must not be read. Each agent counts
    for itself: with several of them the number may differ between ranks.
    """
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return f"/attempt {count}" if count and os.environ.get("GROUP_WORLD_SIZE") == "1" else ""


def _refuse_if_launched(group: Any) -> None:
    size = os.environ.get("WORLD_SIZE", "")
    launched = int(size) if size.isdecimal() else 1
    if group is not None or launched > 1:
        found = f"WORLD_SIZE is {launched}, but " if launched > 1 else ""
        raise RanksError(
            f"{found}torch.distributed is not initialised, so this rank cannot reach the others. "
            "Call torch.distributed.init_process_group first, then megacpp_overlays.verify_ranks."
        )


def _store(distributed: Any) -> Store:
    """Return the store of the default group.

    Raises:
        RanksError: this torch gives no access to it, or the backend has none.
    """
    try:
        found = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public way to it
    except AttributeError as error:
        raise RanksError(
            "this torch does not hand out the store of its process group; compare megacpp_overlays.audit().fingerprint "
            "over the ranks yourself, and report it"
        ) from error
    if type(_unwrapped(found)) is distributed.Store:  # MPI has a placeholder there
        raise RanksError(
            "the backend of the process group has no key-value store, as MPI has none. Use gloo or nccl, or compare "
            "megacpp_overlays.audit().fingerprint over the ranks yourself."
        )
    store: Store = found
    return store


def _unwrapped(store: Any) -> Any:
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


def _in_words(store: Any) -> str:
    inner = _unwrapped(store)
    if (host := getattr(inner, "host", None)) is None:
        return f"the {type(inner).__name__} of the process group"
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeper = "torchrun on the first node keeps it" if by_agent else "the process of rank 0 keeps it"
    return f"the {type(inner).__name__} at {host}:{inner.port} ({keeper})"


def _run(meeting: _Rendezvous, digest: str, own: statement.Statement, timeout: float) -> RanksVerdict:
    """Run the exchange on a thread of its own.

    The exchange never waits inside the store. But a request to a host that vanished blocks until TCP gives up, and a
    request to a stopped process until that process goes on.
    """
    outcome: list[RanksVerdict | Exception] = []
    clock = _StoppableClock()
    store = _WatchedStore(meeting.store, clock)

    def run() -> None:
        try:
            part = Exchange(store, meeting.prefix, meeting.ranks, meeting.rank, timeout)
            outcome.append(part.run(digest, own, clock))
        except Exception as error:  # noqa: BLE001 - it is raised below, on the calling thread
            outcome.append(error)

    thread = threading.Thread(target=run, name="megacpp_overlays.verify_ranks", daemon=True)
    thread.start()
    try:
        silent = _wait(thread, store, timeout)
    finally:
        clock.stop()  # also after a KeyboardInterrupt, so that the thread ends
    match outcome:
        case [RanksVerdict() as verdict]:
            return verdict
        case [PayloadError() as error]:
            raise RanksError(
                f"rank {meeting.rank} cannot read what another rank left for it in {meeting.where}: {error}\n\n"
                "What to do:\n- look for a rank with another megacpp_overlays, or a program that writes to the store"
            ) from error
        case [Exception() as error]:
            raise RanksError(
                f"rank {meeting.rank} could not ask the other {len(meeting.ranks) - 1}: {meeting.where} failed with "
                f"{type(error).__name__}: {error}\n\nWhat to do:\n- look at the log of the process that keeps the store: "
                "it is gone, or cannot be reached from here"
            ) from error
        case _:
            raise RanksError(
                f"rank {meeting.rank} could not ask the other {len(meeting.ranks) - 1}: {meeting.where} has not answered "
                f"for {silent:.0f} s\n\nWhat to do:\n- look at the host that keeps the store first: it hangs, or the "
                "network to it does"
            )


def _wait(thread: threading.Thread, store: _WatchedStore, timeout: float) -> float:
    """Wait until the exchange ends or the store is silent for too long; return the seconds without an answer."""
    longest = timeout + rank_exchange.GRACE_S + rank_exchange.LINGER_S + PATIENCE_S
    waited = silent = 0.0
    events, before = store.events, time.monotonic()
    while thread.is_alive() and waited < longest and silent < timeout + PATIENCE_S:
        thread.join(_POLL_S)
        now = time.monotonic()
        # This process, too, may have been stopped for a while: that time is no silence of the store.
        spent, before = min(now - before, 2 * _POLL_S), now
        waited += spent
        silent = silent + spent if store.events == events and events % 2 else 0.0
        events = store.events
    return silent or waited


class _WatchedStore:
    """A proxy of a store: another thread sees whether a request is pending, and a stopped clock ends all requests.

    An exchange that was given up must not go on when the host is back: the next one may use the store by then.
    """

    def __init__(self, store: Store, clock: _StoppableClock) -> None:
        self._store, self._clock = store, clock
        self.events = 0
        """Counts requests and their ends; odd while a request is pending."""

    def __getattr__(self, name: str) -> Any:
        ask = getattr(self._store, name)

        def answer(*given: Any) -> Any:
            self._clock.demand_time()
            self.events += 1
            try:
                return ask(*given)
            finally:
                self.events += 1

        return answer


class _StoppableClock(SystemClock):
    """The clock of the host, which another thread can stop."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def sleep(self, seconds: float) -> None:
        self._stopped.wait(seconds)
        self.demand_time()

    def demand_time(self) -> None:
        """Raise where the clock was stopped."""
        if self._stopped.is_set():
            raise InterruptedError("the exchange was given up")

    def stop(self) -> None:
        self._stopped.set()


def report(verdict: RanksVerdict) -> str:
    """Return a verdict as text for a log; the same on every rank."""
    parts = [_headline(verdict)]
    if verdict.differences:
        parts.append(differences.table(verdict.differences))
    if verdict.examples:
        hosts = "; ".join(f"rank {each.rank} runs on {each.host}" for each in verdict.examples)
        parts.append(terminal_text.one_line(f"For example, {hosts}."))
    advice = [*differences.advice(verdict.differences), *_advice(verdict)]
    parts.append("\n".join(["What to do:", *(f"- {line}" for line in advice)]))
    return "\n\n".join(parts)


def _headline(verdict: RanksVerdict) -> str:
    if verdict.failure:
        return f"{verdict.size} ranks have no answer within {verdict.timeout:g} s: {terminal_text.one_line(verdict.failure)}"
    here = sum(map(len, verdict.groups))
    if not verdict.missing:
        return f"{verdict.size} ranks do not run the same code: {_odd_ones(verdict.groups)}"
    missing = [rank for rank, _ in verdict.missing]
    head = f"{_named(missing)} of {verdict.size} did not arrive within {verdict.timeout:g} s"
    if len(verdict.groups) == 1:
        return f"{head}; the other {here} run the same code" if here > 1 else head
    return f"{head}, and those that did do not run the same code: {_odd_ones(verdict.groups)}"


def _odd_ones(groups: Sequence[Sequence[int]]) -> str:
    most, *others = groups
    odd = sorted(rank for group in others for rank in group)
    if len(most) == 1 or len(most) <= len(odd) / 2 or len(most) == len(others[0]):
        return " against ".join(_named(group) for group in groups[:4]) + (" and more" if len(groups) > 4 else "")
    return f"{_named(odd)} {'differs' if len(odd) == 1 else 'differ'} from the other {len(most)}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {differences.who(ranks)}"


def _advice(verdict: RanksVerdict) -> list[str]:
    if verdict.failure:
        return ["look at the log of the rank that stopped first"]
    if not verdict.missing:
        return []
    never = [rank for rank, calls in verdict.missing if calls == 0]
    fewer = [rank for rank, calls in verdict.missing if calls and calls < verdict.number]
    other = [rank for rank, calls in verdict.missing if calls is None or calls >= verdict.number]
    lines = []
    if never:
        lines.append(
            f"{_named(never)}: see the log there. It never called verify_ranks: it crashed or hangs before, does not "
            "import megacpp_overlays, or takes another way through the launcher"
        )
    if fewer:
        lines.append(
            f"{_named(fewer)}: see the log there. This was call {verdict.number} of verify_ranks, and it has called less "
            "often: it crashed or hangs since, or the launcher does not call equally often on every rank"
        )
    if other:
        lines.append(f"{_named(other)}: see the log there. It came too late, or crashed on the way")
    return [*lines, "if they are only slow, give the others a longer timeout: verify_ranks(timeout=...), in seconds"]
