"""The exchange of the ranks, simulated: any partition, any rank missing, any crash; up to 16,384 ranks."""

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
    """A rank is gone; nobody may notice but by its silence."""


class Mortal:
    """The store as a rank sees it that crashes after so many questions."""

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
    """Here all ranks live in one process, and the groups of a large world are not small."""
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
    """Play all ranks on one clock; return what each was told, and when."""
    shared, clock = store or Memory(), Moment()
    told: dict[int, RanksVerdict] = {}
    when: dict[int, float] = {}
    ranks = tuple(kinds)
    running = {}
    for rank in ranks:
        if rank not in absent:
            own: Any = Mortal(shared, crashes[rank]) if crashes and rank in crashes else shared
            part = Exchange(own, "group", ranks, rank, timeout)
            told_by_it = says(kinds[rank])
            running[rank] = part.steps(statement.digest(told_by_it), told_by_it, clock)
    queue = [((arrivals or {}).get(rank, 0.0), place, rank) for place, rank in enumerate(running)]
    heapq.heapify(queue)
    while queue:
        clock.seconds, place, rank = heapq.heappop(queue)
        try:
            heapq.heappush(queue, (clock.seconds + next(running[rank]), place, rank))
        except StopIteration as end:
            told[rank], when[rank] = end.value, clock.seconds
        except CrashedError:
            pass
    return told, when


def kept(steps: Generator[float, None, RanksVerdict], told: list[RanksVerdict]) -> Generator[float, None, None]:
    """Go on with the steps of a rank, and keep its verdict."""
    told.append((yield from steps))


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
def test_every_rank_that_is_there_is_told_the_same_and_the_truth(
    world: tuple[dict[int, int], frozenset[int], dict[int, float]],
) -> None:
    kinds, absent, arrivals = world

    told, when = simulate(kinds, absent=absent, arrivals=arrivals)

    assert told.keys() == kinds.keys() - absent
    assert len(set(told.values())) == 1
    verdict = next(iter(told.values()))
    assert {rank for rank, _ in verdict.missing} == absent
    assert {calls for _, calls in verdict.missing} <= {0}
    assert set(verdict.groups) == partition(kinds, absent)
    assert verdict.agreed == (not absent and len(verdict.groups) == 1)
    assert bool(verdict.differences) == (len(verdict.groups) > 1)
    assert max(when.values()) < LATEST


@pytest.mark.unmeasured
@settings(max_examples=50, deadline=None)
@given(worlds(), st.data())
def test_a_rank_that_crashes_on_the_way_hangs_nobody(
    world: tuple[dict[int, int], frozenset[int], dict[int, float]], data: st.DataObject
) -> None:
    kinds, absent, arrivals = world
    crashes = data.draw(st.dictionaries(st.sampled_from(sorted(kinds)), st.integers(0, 12), max_size=len(kinds) - 1))

    told, when = simulate(kinds, absent=absent, arrivals=arrivals, crashes=crashes)

    assert told.keys() >= kinds.keys() - absent - crashes.keys()
    assert len(set(told.values())) <= 1
    assert all(seconds - arrivals[rank] < LATEST for rank, seconds in when.items())
    for verdict in told.values():
        assert {rank for rank, _ in verdict.missing} <= absent | crashes.keys()
        assert not (verdict.agreed and absent)


def test_the_difference_is_told_with_the_ranks_that_hold_each_value() -> None:
    told, _ = simulate({0: 1, 1: 1, 2: 7, 3: 1})

    (difference,) = told[2].differences
    assert (difference.subject, difference.field) == ("megacpp_overlays", "version")
    assert difference.values == (("0.1", (0, 1, 3)), ("0.7", (2,)))
    assert [example.rank for example in told[0].examples] == [0, 2]


def test_a_rank_that_comes_when_it_is_too_late_finds_itself_missed() -> None:
    told, when = simulate({0: 1, 1: 1, 2: 1}, arrivals={1: TIMEOUT + 5})

    assert told[1] == told[0]
    assert told[1].missing == ((1, 0),)
    assert when[1] == TIMEOUT + 5


def test_the_first_whose_time_is_up_speaks_for_all() -> None:
    told, when = simulate({0: 1, 1: 1, 2: 1}, arrivals={0: TIMEOUT - 1, 1: 3.0}, absent=frozenset({2}))

    assert told[0] == told[1]
    assert max(when.values()) < TIMEOUT + 3 + 3 * rank_exchange.MOST_S


def test_a_rank_that_calls_once_more_is_told_how_often_the_others_called() -> None:
    store = Memory()
    simulate({0: 1, 1: 1, 2: 1}, store=store)

    told, _ = simulate({0: 1, 1: 1, 2: 1}, store=store, absent=frozenset({0, 1}))

    assert told[2].number == 2
    assert told[2].missing == ((0, 1), (1, 1))


def test_whoever_judges_too_slowly_does_not_contradict_what_the_others_were_told() -> None:
    clock = Moment()
    told: list[RanksVerdict] = []

    class Slow(Memory):
        """Takes so long to hand out the digests that the other rank gives up meanwhile."""

        def multi_get(self, keys: list[str]) -> list[bytes]:
            clock.seconds += TIMEOUT + rank_exchange.GRACE_S
            list(kept(waits, told))
            return super().multi_get(keys)

    store = Slow()
    leader, other = (Exchange(store, "group", (0, 1), rank, TIMEOUT) for rank in (0, 1))
    waits = other.steps(statement.digest(says(1)), says(1), clock)
    next(waits)
    told.append(leader.run(statement.digest(says(1)), says(1), clock))

    assert [verdict.failure for verdict in told] == ["rank 0 was about to say what it found, and did not"] * 2


def test_a_failed_comparison_does_not_spoil_the_next() -> None:
    store = Memory()
    simulate({0: 1, 1: 2}, store=store)

    told, _ = simulate({0: 1, 1: 1}, store=store)

    assert told[0].agreed
    assert told[1].agreed


def test_agreement_leaves_nothing_behind_but_a_count_for_each_rank() -> None:
    store = Memory()

    simulate(dict.fromkeys(range(9), 1), store=store)

    assert store.held == {f"group/calls/{rank}": b"1" for rank in range(9)}


def test_a_store_that_can_only_do_the_least_is_enough() -> None:
    class Least(Memory):
        def multi_get(self, keys: list[str]) -> list[bytes]:
            raise RuntimeError("not implemented")

        delete_key = multi_get  # type: ignore[assignment]

    told, _ = simulate({0: 1, 1: 1, 2: 3}, store=Least())

    assert [verdict.groups for verdict in told.values()] == [((0, 1), (2,))] * 3


def test_a_world_in_which_every_rank_differs_still_gets_a_short_table() -> None:
    size = rank_exchange.MOST_STATEMENTS + 20
    store = Memory()

    told, _ = simulate({rank: rank for rank in range(size)}, store=store)

    verdict = told[0]
    assert sorted(rank for group in verdict.groups for rank in group) == list(range(size))
    assert len(verdict.groups) == rank_exchange.MOST_STATEMENTS + 1
    assert len(verdict.examples) == rank_exchange.MOST_STATEMENTS
    assert verdict.differences[-1].values[1] == ("others, not listed", verdict.groups[-1])


def test_statements_that_differ_where_nobody_looks_are_not_taken_for_equal() -> None:
    told, _ = simulate({0: 1, 1: 2}, says=lambda kind: {**says(1), "unheard of": kind})

    assert told[0] == told[1]
    assert not told[0].agreed
    assert [each.field for each in told[0].differences] == ["statement"]


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
    """A store in which the statements of some kinds are something else."""

    def __init__(self, left: Mapping[int, str]) -> None:
        super().__init__()
        self._left = {f"/statement/{statement.digest(says(kind))}": text for kind, text in left.items()}

    def set(self, key: str, value: str) -> None:
        spoilt = [text for ending, text in self._left.items() if key.endswith(ending)]
        super().set(key, spoilt[0] if spoilt else value)


@pytest.mark.parametrize(("left", "why"), LEFT.values(), ids=LEFT)
def test_a_rank_that_leaves_no_statement_is_named_and_the_others_are_told_in_detail(left: str, why: str) -> None:
    told, _ = simulate({0: 1, 1: 2, 2: 3}, store=Spoilt({3: left}))

    assert told[0] == told[1] == told[2]
    assert told[0].groups == ((0,), (1,), (2,))
    assert [each.field for each in told[0].differences] == ["version", "statement"]
    (read, unread) = told[0].differences[1].values
    assert read == ("read", (0, 1))
    assert unread[1] == (2,)
    assert unread[0].startswith("unreadable: ")
    assert why in unread[0]


@pytest.mark.parametrize(("left", "why"), LEFT.values(), ids=LEFT)
def test_ranks_that_differ_do_not_agree_where_no_statement_can_be_read(left: str, why: str) -> None:
    told, _ = simulate({rank: int(rank == 15) for rank in range(16)}, store=Spoilt({0: left, 1: left}))

    assert len(set(told.values())) == 1
    assert not told[0].agreed
    assert told[0].groups == (tuple(range(15)), (15,))
    (difference,) = told[0].differences
    assert [held_by for _, held_by in difference.values] == [tuple(range(15)), (15,)]
    assert all(why in value for value, _ in difference.values)
    text = ranks.report(told[0])
    assert text.startswith("16 ranks do not run the same code: rank 15 differs from the other 15")
    assert "unreadable: " in text
    assert "For example" not in text


def test_statements_that_are_too_large_are_unreadable_and_say_so() -> None:
    def large(kind: int) -> dict[str, Any]:
        return {**says(kind), "off": [f"{number:020}" for number in range(200_000)]}

    texts = {kind: large(kind) for kind in (1, 2)}
    store = Memory()

    told, _ = simulate({0: 1, 1: 1, 2: 2}, store=store, says=texts.__getitem__)
    alike, _ = simulate({0: 1, 1: 1, 2: 1}, says=texts.__getitem__)

    assert not told[0].agreed
    assert told[0].groups == ((0, 1), (2,))
    assert all(
        re.match("unreadable: 46[0-9]{5} bytes, more than 4194304", each) for each, _ in told[0].differences[0].values
    )
    assert max(map(len, store.held.values())) < 10_000
    assert alike[0].agreed


def test_a_statement_that_is_not_in_the_store_is_not_taken_for_another_one() -> None:
    class Forgetful(Memory):
        def set(self, key: str, value: str) -> None:
            if "/statement/" not in key:
                super().set(key, value)

    told, _ = simulate({0: 1, 1: 2, 2: 3}, store=Forgetful())

    assert not told[0].agreed
    assert told[0].groups == ((0,), (1,), (2,))
    assert [each for each, _ in told[0].differences[0].values] == [
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
def test_what_is_no_verdict_is_refused(changes: dict[str, Any]) -> None:
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
def test_what_all_ranks_ask_and_leave_grows_with_their_number_and_no_faster(size: int) -> None:
    store = Memory()

    told, when = simulate(dict.fromkeys(range(size), 1), store=store)

    assert all(verdict.agreed for verdict in told.values())
    assert sum(store.asked.values()) < 16 * size + 40
    assert store.most_held < 4 * size + 20
    assert max(when.values()) < 2 * rank_exchange.MOST_S


@pytest.mark.unmeasured
def test_one_rank_of_many_is_found() -> None:
    kinds = {rank: 1 + (rank == 1_999) for rank in range(4_096)}

    told, _ = simulate(kinds)

    assert {verdict.groups[1] for verdict in told.values()} == {(1_999,)}


@pytest.mark.full
@pytest.mark.unmeasured
@pytest.mark.parametrize("gone", [[0], [9_999, 10_000, 16_383]])
def test_ranks_that_are_missing_of_many_are_named(gone: Sequence[int]) -> None:
    store = Memory()

    told, when = simulate(dict.fromkeys(range(16_384), 1), absent=frozenset(gone), store=store, timeout=5.0)

    assert {verdict.missing for verdict in told.values()} == {tuple((rank, 0) for rank in gone)}
    assert max(when.values()) < 5.0 + rank_exchange.LINGER_S + 2 * rank_exchange.MOST_S
    assert store.asked["check"] < 8 * 16_384  # five seconds of waiting


def interrupted(store: Memory, ranks: tuple[int, ...], rank: int, kind: int = 1, steps: int = 1) -> None:
    """Let a rank begin a call, and end it by an interrupt."""
    begun = Exchange(store, "group", ranks, rank, TIMEOUT).steps(statement.digest(says(kind)), says(kind), Moment())
    for _ in range(steps):
        next(begun)
    begun.close()


def test_a_call_that_was_interrupted_is_made_up_for_by_the_next() -> None:
    store = Memory()
    interrupted(store, (0, 1, 2), rank=1)

    for _ in range(3):
        told, _ = simulate({0: 1, 1: 1, 2: 1}, store=store)

        assert [verdict.agreed for verdict in told.values()] == [True] * 3


def test_a_call_that_was_interrupted_when_the_others_had_agreed_reads_what_they_read() -> None:
    store = Memory()
    interrupted(store, (0, 1, 2), rank=1)
    simulate({0: 1, 1: 1, 2: 1}, absent=frozenset({1}), store=store)

    alone, when = simulate({0: 1, 1: 1, 2: 1}, absent=frozenset({0, 2}), store=store)
    together, _ = simulate({0: 1, 1: 1, 2: 1}, store=store)

    assert alone[1].agreed
    assert when[1] == 0
    assert all(verdict.agreed for verdict in together.values())


def test_what_a_rank_said_before_an_interrupt_does_not_stand_for_what_it_says_now() -> None:
    store = Memory()
    interrupted(store, (0, 1), rank=1)
    simulate({0: 1, 1: 1}, absent=frozenset({1}), store=store)

    told, _ = simulate({0: 1, 1: 2}, store=store)

    assert not any(verdict.agreed for verdict in told.values())


def test_a_call_too_many_does_not_spoil_the_next_of_all() -> None:
    store = Memory()
    simulate({0: 1, 1: 1, 2: 1}, store=store)
    simulate({0: 1, 1: 1, 2: 1}, absent=frozenset({0, 2}), store=store)

    told, _ = simulate({0: 1, 1: 1, 2: 1}, arrivals={0: 0.1, 2: 0.2}, store=store)

    assert [verdict.agreed for verdict in told.values()] == [True] * 3
