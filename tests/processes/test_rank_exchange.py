"""A simulation of the exchange between ranks: any partition, any missing rank, any crash, and up to 16,384 ranks."""

from __future__ import annotations

import base64
import functools
import heapq
import re
import tracemalloc
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_store import Memory

from megacpp_overlays.loader import statement
from megacpp_overlays.processes import rank_exchange, ranks
from megacpp_overlays.processes.rank_exchange import Exchange, RanksVerdict

TIMEOUT = 60.0
LATEST = TIMEOUT + rank_exchange.GRACE_S + rank_exchange.LINGER_S + 3 * rank_exchange.MOST_S


class CrashedError(Exception):
    """A rank has crashed; the other ranks see only that it is silent."""


class Mortal:
    """A view of the store for a rank that crashes after a number of requests."""

    def __init__(self, store: Memory, questions: int) -> None:
        self._store = store
        self._left = questions

    def __getattr__(self, name: str) -> Any:
        if self._left == 0:
            raise CrashedError
        self._left -= 1
        return getattr(self._store, name)


class Moment:
    """A clock that the simulation sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture(autouse=True)
def one_copy_of_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode each verdict once: all ranks are in one process, and the groups of a large world are large."""
    monkeypatch.setattr(rank_exchange, "decode", functools.cache(rank_exchange.decode))


def says(kind: int) -> dict[str, Any]:
    return {"schema": 1, "version": f"0.{kind}", "mode": "auto", "python": "3.12.1", "off": [], "decisions": []}


def simulate(
    kinds: Mapping[int, int],
    *,
    absent: frozenset[int] = frozenset(),
    arrivals: Mapping[int, float] | None = None,
    crashes: Mapping[int, int] | None = None,
    store: Memory | None = None,
    timeout: float = TIMEOUT,
    says: Callable[[int], dict[str, Any]] = says,
) -> tuple[dict[int, RanksVerdict], dict[int, float]]:
    """Run all ranks on one clock; return the verdict of each rank and the time at which it got it."""
    shared, clock = store or Memory(), Moment()
    verdicts: dict[int, RanksVerdict] = {}
    when: dict[int, float] = {}
    ranks = tuple(kinds)
    running = {}
    for rank in ranks:
        if rank not in absent:
            own: Any = Mortal(shared, crashes[rank]) if crashes and rank in crashes else shared
            part = Exchange(own, "group", ranks, rank, timeout)
            own_statement = says(kinds[rank])
            running[rank] = part.steps(statement.digest(own_statement), own_statement, clock)
    queue = [((arrivals or {}).get(rank, 0.0), place, rank) for place, rank in enumerate(running)]
    heapq.heapify(queue)
    while queue:
        clock.seconds, place, rank = heapq.heappop(queue)
        try:
            heapq.heappush(queue, (clock.seconds + next(running[rank]), place, rank))
        except StopIteration as end:
            verdicts[rank], when[rank] = end.value, clock.seconds
        except CrashedError:
            pass
    return verdicts, when


def kept(steps: Generator[float, None, RanksVerdict], verdicts: list[RanksVerdict]) -> Generator[float, None, None]:
    """Continue the steps of a rank and append its verdict to a list."""
    verdicts.append((yield from steps))


def partition(kinds: Mapping[int, int], absent: frozenset[int]) -> set[tuple[int, ...]]:
    present = [rank for rank in kinds if rank not in absent]
    return {tuple(sorted(r for r in present if kinds[r] == kind)) for kind in {kinds[r] for r in present}}


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[int, int], frozenset[int], dict[int, float]]:
    ranks = draw(st.lists(st.integers(0, 99), min_size=2, max_size=30, unique=True))
    kinds = {rank: draw(st.integers(0, 3)) for rank in ranks}
    absent = draw(st.frozensets(st.sampled_from(ranks), max_size=len(ranks) - 1))
    arrivals = {rank: draw(st.floats(0, TIMEOUT / 2)) for rank in ranks}
    return kinds, absent, arrivals


@pytest.mark.unmeasured
@settings(max_examples=100, deadline=None)
@given(worlds())
def test_all_ranks_that_arrive_get_the_same_right_answer(
    world: tuple[dict[int, int], frozenset[int], dict[int, float]],
) -> None:
    kinds, absent, arrivals = world

    verdicts, when = simulate(kinds, absent=absent, arrivals=arrivals)

    assert verdicts.keys() == kinds.keys() - absent
    assert len(set(verdicts.values())) == 1
    verdict = next(iter(verdicts.values()))
    assert {rank for rank, _ in verdict.missing} == absent
    assert {calls for _, calls in verdict.missing} <= {0}
    assert set(verdict.groups) == partition(kinds, absent)
    assert verdict.agreed == (not absent and len(verdict.groups) == 1)
    assert bool(verdict.differences) == (len(verdict.groups) > 1)
    assert max(when.values()) < LATEST


@pytest.mark.unmeasured
@settings(max_examples=50, deadline=None)
@given(worlds(), st.data())
def test_a_rank_that_crashes_on_the_way_hangs_no_other_rank(
    world: tuple[dict[int, int], frozenset[int], dict[int, float]], data: st.DataObject
) -> None:
    kinds, absent, arrivals = world
    crashes = data.draw(st.dictionaries(st.sampled_from(sorted(kinds)), st.integers(0, 12), max_size=len(kinds) - 1))

    verdicts, when = simulate(kinds, absent=absent, arrivals=arrivals, crashes=crashes)

    assert verdicts.keys() >= kinds.keys() - absent - crashes.keys()
    assert len(set(verdicts.values())) <= 1
    assert all(seconds - arrivals[rank] < LATEST for rank, seconds in when.items())
    for verdict in verdicts.values():
        assert {rank for rank, _ in verdict.missing} <= absent | crashes.keys()
        assert not (verdict.agreed and absent)


def test_a_difference_names_the_ranks_that_hold_each_value() -> None:
    verdicts, _ = simulate({0: 1, 1: 1, 2: 7, 3: 1})

    (difference,) = verdicts[2].differences
    assert (difference.subject, difference.field) == ("megacpp_overlays", "version")
    assert difference.values == (("0.1", (0, 1, 3)), ("0.7", (2,)))
    assert [example.rank for example in verdicts[0].examples] == [0, 2]


def test_a_rank_that_comes_when_it_is_too_late_finds_itself_missed() -> None:
    verdicts, when = simulate({0: 1, 1: 1, 2: 1}, arrivals={1: TIMEOUT + 5})

    assert verdicts[1] == verdicts[0]
    assert verdicts[1].missing == ((1, 0),)
    assert when[1] == TIMEOUT + 5


def test_the_first_whose_time_is_up_speaks_for_all() -> None:
    verdicts, when = simulate({0: 1, 1: 1, 2: 1}, arrivals={0: TIMEOUT - 1, 1: 3.0}, absent=frozenset({2}))

    assert verdicts[0] == verdicts[1]
    assert max(when.values()) < TIMEOUT + 3 + 3 * rank_exchange.MOST_S


def test_a_rank_that_calls_once_more_learns_how_often_the_others_called() -> None:
    store = Memory()
    simulate({0: 1, 1: 1, 2: 1}, store=store)

    verdicts, _ = simulate({0: 1, 1: 1, 2: 1}, store=store, absent=frozenset({0, 1}))

    assert verdicts[2].number == 2
    assert verdicts[2].missing == ((0, 1), (1, 1))


def test_a_slow_leader_returns_the_failure_that_the_other_ranks_got() -> None:
    clock = Moment()
    verdicts: list[RanksVerdict] = []

    class Slow(Memory):
        """A store that returns the digests so late that the other rank gives up first."""

        def multi_get(self, keys: list[str]) -> list[bytes]:
            clock.seconds += TIMEOUT + rank_exchange.GRACE_S
            list(kept(waits, verdicts))
            return super().multi_get(keys)

    store = Slow()
    leader, other = (Exchange(store, "group", (0, 1), rank, TIMEOUT) for rank in (0, 1))
    waits = other.steps(statement.digest(says(1)), says(1), clock)
    next(waits)
    verdicts.append(leader.run(statement.digest(says(1)), says(1), clock))

    assert [verdict.failure for verdict in verdicts] == ["rank 0 was about to say what it found, and did not"] * 2


def test_a_failed_comparison_does_not_spoil_the_next() -> None:
    store = Memory()
    simulate({0: 1, 1: 2}, store=store)

    verdicts, _ = simulate({0: 1, 1: 1}, store=store)

    assert verdicts[0].agreed
    assert verdicts[1].agreed


def test_agreement_leaves_nothing_behind_but_a_count_for_each_rank() -> None:
    store = Memory()

    simulate(dict.fromkeys(range(9), 1), store=store)

    assert store.held == {f"group/calls/{rank}": b"1" for rank in range(9)}


def test_a_store_that_can_only_do_the_least_is_enough() -> None:
    class Least(Memory):
        def multi_get(self, keys: list[str]) -> list[bytes]:
            raise RuntimeError("not implemented")

        delete_key = multi_get  # type: ignore[assignment]

    verdicts, _ = simulate({0: 1, 1: 1, 2: 3}, store=Least())

    assert [verdict.groups for verdict in verdicts.values()] == [((0, 1), (2,))] * 3


def test_a_world_in_which_every_rank_differs_still_gets_a_short_table() -> None:
    size = rank_exchange.MOST_STATEMENTS + 20
    store = Memory()

    verdicts, _ = simulate({rank: rank for rank in range(size)}, store=store)

    verdict = verdicts[0]
    assert sorted(rank for group in verdict.groups for rank in group) == list(range(size))
    assert len(verdict.groups) == rank_exchange.MOST_STATEMENTS + 1
    assert len(verdict.examples) == rank_exchange.MOST_STATEMENTS
    assert verdict.differences[-1].values[1] == ("others, not listed", verdict.groups[-1])


def test_statements_that_differ_in_an_unknown_field_are_not_equal() -> None:
    verdicts, _ = simulate({0: 1, 1: 2}, says=lambda kind: {**says(1), "unheard of": kind})

    assert verdicts[0] == verdicts[1]
    assert not verdicts[0].agreed
    assert [each.field for each in verdicts[0].differences] == ["statement"]


LEFT = {
    "no base64": ("%%%", "cannot be unpacked: Error: "),
    "no statement": (
        rank_exchange.encode({"rank": 1, "host": "a", "statement": {"decisions": "none"}}),
        "this is no statement of a process",
    ),
    "no field": (rank_exchange.encode({"rank": 1}), "it has no 'host'"),
    "of nobody": (
        rank_exchange.encode({"rank": 99, "host": "a", "statement": says(1)}),
        "a field of it is not that of a verdict",
    ),
    "nested": (base64.b64encode(zlib.compress(b"[" * 1_000_000)).decode(), "cannot be unpacked: RecursionError"),
    "a bomb": (base64.b64encode(zlib.compress(b'{"rank": "' + bytes(50 << 20))).decode(), "larger than 4194304 bytes"),
}


class Spoilt(Memory):
    """A store that replaces the statements of some kinds by other texts."""

    def __init__(self, left: Mapping[int, str]) -> None:
        super().__init__()
        self._left = {f"/statement/{statement.digest(says(kind))}": text for kind, text in left.items()}

    def set(self, key: str, value: str) -> None:
        spoilt = [text for ending, text in self._left.items() if key.endswith(ending)]
        super().set(key, spoilt[0] if spoilt else value)


@pytest.mark.parametrize(("left", "why"), LEFT.values(), ids=LEFT)
def test_a_rank_without_a_statement_is_named_and_the_others_are_compared_in_detail(left: str, why: str) -> None:
    verdicts, _ = simulate({0: 1, 1: 2, 2: 3}, store=Spoilt({3: left}))

    assert verdicts[0] == verdicts[1] == verdicts[2]
    assert verdicts[0].groups == ((0,), (1,), (2,))
    assert [each.field for each in verdicts[0].differences] == ["version", "statement"]
    (read, unread) = verdicts[0].differences[1].values
    assert read == ("read", (0, 1))
    assert unread[1] == (2,)
    assert unread[0].startswith("unreadable: ")
    assert why in unread[0]


@pytest.mark.parametrize(("left", "why"), LEFT.values(), ids=LEFT)
def test_ranks_that_differ_do_not_agree_where_no_statement_can_be_read(left: str, why: str) -> None:
    verdicts, _ = simulate({rank: int(rank == 15) for rank in range(16)}, store=Spoilt({0: left, 1: left}))

    assert len(set(verdicts.values())) == 1
    assert not verdicts[0].agreed
    assert verdicts[0].groups == (tuple(range(15)), (15,))
    (difference,) = verdicts[0].differences
    assert [held_by for _, held_by in difference.values] == [tuple(range(15)), (15,)]
    assert all(why in value for value, _ in difference.values)
    text = ranks.report(verdicts[0])
    assert text.startswith("16 ranks do not run the same code: rank 15 differs from the other 15")
    assert "unreadable: " in text
    assert "For example" not in text


def test_statements_that_are_too_large_are_unreadable_and_say_so() -> None:
    def large(kind: int) -> dict[str, Any]:
        return {**says(kind), "off": [f"{number:020}" for number in range(200_000)]}

    texts = {kind: large(kind) for kind in (1, 2)}
    store = Memory()

    verdicts, _ = simulate({0: 1, 1: 1, 2: 2}, store=store, says=texts.__getitem__)
    alike, _ = simulate({0: 1, 1: 1, 2: 1}, says=texts.__getitem__)

    assert not verdicts[0].agreed
    assert verdicts[0].groups == ((0, 1), (2,))
    assert all(
        re.match("unreadable: 46[0-9]{5} bytes, more than 4194304", each)
        for each, _ in verdicts[0].differences[0].values
    )
    assert max(map(len, store.held.values())) < 10_000
    assert alike[0].agreed


def test_a_statement_that_is_not_in_the_store_is_not_taken_for_another_one() -> None:
    class Forgetful(Memory):
        def set(self, key: str, value: str) -> None:
            if "/statement/" not in key:
                super().set(key, value)

    verdicts, _ = simulate({0: 1, 1: 2, 2: 3}, store=Forgetful())

    assert not verdicts[0].agreed
    assert verdicts[0].groups == ((0,), (1,), (2,))
    assert [each for each, _ in verdicts[0].differences[0].values] == [
        f"not in the store (kind {kind})" for kind in (1, 2, 3)
    ]


VERDICT = {"size": 3, "number": 1, "timeout": 1.0, "groups": ["0-1", "2"], "missing": ""}


def test_a_verdict_is_read_back() -> None:
    verdict = rank_exchange.decode(rank_exchange.encode(VERDICT).encode(), (0, 1, 2))

    assert (verdict.groups, verdict.missing, verdict.differences) == (((0, 1), (2,)), (), ())


@pytest.mark.parametrize(
    "changes",
    [
        {"missing": "0-300000000"},
        {"missing": "0-2, " * 200_000},
        {"missing": "7"},
        {"missing": "1-2-3"},
        {"missing": "9" * 5000},
        {"missing": 3},
        {"groups": ["0-2", "0-2"]},
        {"groups": [None]},
        {"groups": 3},
        {"size": "3"},
        {"timeout": None},
        {"examples": [[0]]},
        {"examples": [["0", "a"]]},
        {"differences": [["a", "b", [["c", [0, 0]]], "d"]]},
        {"differences": [["a", "b", [["c", [9]]], "d"]]},
        {"differences": [["a", "b", [["c", [-1]]], "d"]]},
        {"differences": [["a", "b", [[{}, [0]]], "d"]]},
        {"differences": [["a", "b", [], "d"]] * 2000},
        {"missing": "0", "calls": ["1"]},
        {"failure": {}, "missing": None},
        {"host" * 2_000_000: 1},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_a_value_that_is_no_verdict_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(rank_exchange.PayloadError):
        rank_exchange.decode(rank_exchange.encode({**VERDICT, **changes}).encode(), (0, 1, 2))


def test_no_more_of_a_value_is_unpacked_than_a_verdict_has() -> None:
    packer = zlib.compressobj(9)
    begins, again = (packer.compress(bytes(64 << 20)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    bomb = base64.b64encode(begins + again * 31)  # 2 GiB
    assert 2_500_000 < len(bomb) < 3_000_000

    tracemalloc.start()
    with pytest.raises(rank_exchange.PayloadError, match=r"larger than 4194304 bytes|cannot be unpacked"):
        rank_exchange.decode(bomb, (0, 1, 2))

    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()


@pytest.mark.unmeasured
@pytest.mark.parametrize("size", [2, 1024, pytest.param(16_384, marks=pytest.mark.full)])
def test_requests_and_keys_of_all_ranks_grow_linearly_with_their_number(size: int) -> None:
    store = Memory()

    verdicts, when = simulate(dict.fromkeys(range(size), 1), store=store)

    assert all(verdict.agreed for verdict in verdicts.values())
    assert sum(store.asked.values()) < 16 * size + 40
    assert store.most_held < 4 * size + 20
    assert max(when.values()) < 2 * rank_exchange.MOST_S


@pytest.mark.unmeasured
def test_one_rank_of_many_is_found() -> None:
    kinds = {rank: 1 + (rank == 1_999) for rank in range(4_096)}

    verdicts, _ = simulate(kinds)

    assert {verdict.groups[1] for verdict in verdicts.values()} == {(1_999,)}


@pytest.mark.full
@pytest.mark.unmeasured
@pytest.mark.parametrize("gone", [[0], [9_999, 10_000, 16_383]])
def test_ranks_that_are_missing_of_many_are_named(gone: Sequence[int]) -> None:
    store = Memory()

    verdicts, when = simulate(dict.fromkeys(range(16_384), 1), absent=frozenset(gone), store=store, timeout=5.0)

    assert {verdict.missing for verdict in verdicts.values()} == {tuple((rank, 0) for rank in gone)}
    assert max(when.values()) < 5.0 + rank_exchange.LINGER_S + 2 * rank_exchange.MOST_S
    assert store.asked["check"] < 8 * 16_384  # five seconds of waiting


def interrupted(store: Memory, ranks: tuple[int, ...], rank: int, kind: int = 1, steps: int = 1) -> None:
    """Begin a call of a rank and interrupt it after a number of steps."""
    begun = Exchange(store, "group", ranks, rank, TIMEOUT).steps(statement.digest(says(kind)), says(kind), Moment())
    for _ in range(steps):
        next(begun)
    begun.close()


def test_a_call_that_was_interrupted_is_made_up_for_by_the_next() -> None:
    store = Memory()
    interrupted(store, (0, 1, 2), rank=1)

    for _ in range(3):
        verdicts, _ = simulate({0: 1, 1: 1, 2: 1}, store=store)

        assert [verdict.agreed for verdict in verdicts.values()] == [True] * 3


def test_a_call_that_was_interrupted_after_the_others_agreed_reads_their_verdict() -> None:
    store = Memory()
    interrupted(store, (0, 1, 2), rank=1)
    simulate({0: 1, 1: 1, 2: 1}, absent=frozenset({1}), store=store)

    alone, when = simulate({0: 1, 1: 1, 2: 1}, absent=frozenset({0, 2}), store=store)
    together, _ = simulate({0: 1, 1: 1, 2: 1}, store=store)

    assert alone[1].agreed
    assert when[1] == 0
    assert all(verdict.agreed for verdict in together.values())


def test_the_statement_of_a_rank_before_an_interrupt_does_not_count_for_its_next_call() -> None:
    store = Memory()
    interrupted(store, (0, 1), rank=1)
    simulate({0: 1, 1: 1}, absent=frozenset({1}), store=store)

    verdicts, _ = simulate({0: 1, 1: 2}, store=store)

    assert not any(verdict.agreed for verdict in verdicts.values())


def test_a_call_too_many_does_not_spoil_the_next_of_all() -> None:
    store = Memory()
    simulate({0: 1, 1: 1, 2: 1}, store=store)
    simulate({0: 1, 1: 1, 2: 1}, absent=frozenset({0, 2}), store=store)

    verdicts, _ = simulate({0: 1, 1: 1, 2: 1}, arrivals={0: 0.1, 2: 0.2}, store=store)

    assert [verdict.agreed for verdict in verdicts.values()] == [True] * 3
