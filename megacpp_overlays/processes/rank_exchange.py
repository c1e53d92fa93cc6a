"""Protocol by which the ranks of a group compare their statements through a key-value store, without a hang.

    every rank     counts its call and leaves its digest; the first with a digest leaves the whole statement too
    the leader     waits for all digests and leaves the verdict
    every rank     reads the verdict, says so, and goes

These are O(N) small messages, and the store's host holds O(N) bytes until they are done. Nothing here blocks inside the
store, because a training process shares its connection with watchdogs: a rank that has to wait asks again, and seldom
enough that a large world does not flood the one process that answers.

Whoever's time is up first does the leader's work with what is there, so a missing leader is one missing rank among
others. All that is here is bookkeeping over `Store` and a clock; torch is the caller's business.
"""

from __future__ import annotations

import base64
import contextlib
import json
import platform
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from megacpp_overlays.loader import statement
from megacpp_overlays.processes import differences
from megacpp_overlays.processes.differences import Difference, StatementGroup

GRACE_S = 30.0
"""How long the rest waits for whoever judges, once their own time is up."""
LINGER_S = 10.0
"""How long the leader waits for the others to read the verdict. Its process may be the host of the store."""
LEAST_S, MOST_S = 0.005, 1.0
"""Bounds of the time between two questions of a waiting rank."""
QUESTIONS_PER_S = 20_000
"""What all waiting ranks together may ask of the store."""

BATCH = 512
"""Keys in one question of the leader."""
MOST_STATEMENTS = 64
"""Kinds of statements that are listed separately. More of them means that something is wrong with the statement."""
MOST_ASKED = 256
"""Missing ranks whose calls are counted."""


MOST_BYTES = 4 << 20
"""Of one value of the store, packed or not. A statement has about 20 kB, and a verdict on 100,000 ranks less than 1 MB."""
MOST_DIFFERENCES = 1000


class Store(Protocol):
    """Key-value store: the part of `torch.distributed.Store` that is used. `multi_get` and `delete_key` are optional."""

    def set(self, key: str, value: str, /) -> Any:
        """Leave a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value; only asked for keys that are there."""

    def add(self, key: str, value: int, /) -> int:
        """Add to a counter that starts at nothing, and return it."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys are there."""


class Clock(Protocol):
    """Source of the time, in seconds, and of waiting."""

    def now(self) -> float:
        """Return seconds since some moment."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class SystemClock:
    """The clock of the host."""

    def now(self) -> float:
        """Return seconds since some moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


class Example(NamedTuple):
    """One rank of those that make the same statement, and its host."""

    rank: int
    host: str


class RanksVerdict(NamedTuple):
    """Result of a comparison, the same on every rank."""

    size: int
    """Ranks in the group."""
    number: int
    """Which call of each rank it is about, from 1."""
    timeout: float
    """Seconds that whoever judged was ready to wait."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks that say the same, the largest group first; those whose statement could not be read come last. Only what is
    beyond `MOST_STATEMENTS` kinds shares a group."""
    examples: tuple[Example, ...]
    """One rank of each group whose statement was read."""
    differences: tuple[Difference, ...]
    missing: tuple[tuple[int, int | None], ...]
    """Ranks that are not there, each with how often it has called; None where that was not asked."""
    failure: str = ""
    """Why there is no answer at all."""

    @property
    def agreed(self) -> bool:
        """Whether every rank is there and says the same."""
        return not self.missing and not self.failure and len(self.groups) == 1


class Exchange:
    """One rank's side of one comparison.

    Args:
        store: shared by all ranks of the group.
        prefix: the same on all ranks of the group, and no other group's.
        ranks: all ranks of the group in one order.
        rank: which of them this is.
        timeout: seconds that this rank waits for the others.
    """

    def __init__(self, store: Store, prefix: str, ranks: tuple[int, ...], rank: int, timeout: float) -> None:
        self._store = store
        self._prefix = prefix
        self._ranks = ranks
        self._rank = rank
        self._timeout = timeout
        # The host of the store is rank 0 wherever it is a rank, and must not go while others still ask.
        self._leads = rank == min(ranks)
        self._waiting_for = list(ranks) if self._leads else []
        self._number = 0
        self._since = 0.0
        self._judged = False

    def run(self, digest: str, statement: Mapping[str, Any], clock: Clock) -> RanksVerdict:
        """Take part, and return the verdict.

        It returns `GRACE_S` and `LINGER_S` after the timeout at the latest, if the store answers.
        """
        steps = self.steps(digest, statement, clock)
        while True:
            try:
                seconds = next(steps)
            except StopIteration as end:
                verdict: RanksVerdict = end.value
                return verdict
            clock.sleep(seconds)

    def steps(self, digest: str, statement: Mapping[str, Any], clock: Clock) -> Generator[float, None, RanksVerdict]:
        """Yield the seconds to wait until the next step, and return the verdict."""
        self._arrive(digest, statement, clock.now())
        pauses = self.pauses()
        while (verdict := self._poll(clock.now())) is None:
            yield next(pauses)
        yield from self._leave(digest, verdict, clock)
        return verdict

    def pauses(self) -> Iterator[float]:
        """Yield the seconds between two questions, growing."""
        # There is one leader, and everybody waits for it.
        share = LEAST_S if self._leads else len(self._ranks) / QUESTIONS_PER_S
        pause = min(max(share, LEAST_S), MOST_S)
        most = min(20 * pause, MOST_S)
        # Ranks that started together must not ask together.
        spread = 0.75 + (self._rank * 0.618) % 0.5
        while True:
            yield pause * spread
            pause = min(pause * 1.25, most)

    def _arrive(self, digest: str, statement: Mapping[str, Any], now: float) -> None:
        """Leave the digest of this rank."""
        self._since = now
        # Counted in the store: a process that replaces another goes on where that one stopped.
        self._number = self._next_number(digest)
        self._store.set(self._key("begun"), "1")
        # The statement comes before the digest: when all digests are there, so are all statements.
        first_with_it = self._store.add(self._key("holders", digest), 1) == 1
        if first_with_it and self._store.add(self._key("kinds"), 1) <= MOST_STATEMENTS:
            self._store.set(self._key("statement", digest), self._packed(statement))
        self._store.set(self._key("digest", self._rank), digest)

    def _packed(self, statement: Mapping[str, Any]) -> str:
        """Return the statement of this rank as a value of the store; one that no rank would read is only named."""
        head = {"rank": self._rank, "host": platform.node()}
        told = {**head, "statement": statement}
        size = max(len(_as_json(told)), len(packed := encode(told)))
        return packed if size <= MOST_BYTES else encode({**head, "unreadable": f"{size} bytes, more than {MOST_BYTES}"})

    def _next_number(self, digest: str) -> int:
        """Return which comparison this call takes part in.

        Calls are counted when they end, so one that was interrupted is made up for by the next, which joins the same
        comparison and not one that the others will never join. Who was found missing in one joins that which others have
        begun since; so does who was interrupted in one that went on without it and has something else to say now.
        """
        number = self._store.add(self._calls_of(self._rank), 0) + 1
        while self._store.check([self._key_of(number + 1, "begun")]) or self._has_said_otherwise(number, digest):
            number = self._store.add(self._calls_of(self._rank), 1) + 1
        return number

    def _has_said_otherwise(self, number: int, digest: str) -> bool:
        """Note that this rank is here; return whether it was before, and others have gone on with what it said then."""
        if self._store.add(self._key_of(number, "here", self._rank), 1) == 1:
            return False
        own, verdict = self._key_of(number, "digest", self._rank), self._key_of(number, "verdict")
        return self._store.check([own, verdict]) and self._store.get(own).decode() != digest

    def _calls_of(self, rank: int) -> str:
        return f"{self._prefix}/calls/{rank}"

    def _poll(self, now: float) -> RanksVerdict | None:
        """Return the verdict if it is there; do what has to be done for it otherwise."""
        if self._store.check([self._key("verdict")]):
            return self._read()
        late = now - self._since - self._timeout
        if not self._judged and (late >= 0 or (self._leads and self._all_are_here())):
            self._judged = True
            if self._store.add(self._key("judges"), 1) == 1:
                self._store.set(self._key("judge"), str(self._rank))
                found = encode(self._judge())
                # Whoever was too slow to judge must not take back what the others were told meanwhile.
                if not self._store.check([self._key("verdict")]):
                    self._store.set(self._key("verdict"), found)
                return self._read()
        if late >= GRACE_S:
            told = self._store.check([self._key("judge")])
            judge = f"rank {_digest(self._store.get(self._key('judge')))}" if told else "a rank"
            failure = f"{judge} was about to say what it found, and did not"
            self._store.set(self._key("verdict"), encode({**self._frame(), "failure": failure}))
            return self._read()
        return None

    def _leave(self, digest: str, verdict: RanksVerdict, clock: Clock) -> Iterator[float]:
        """Say that the verdict was read; the leader waits for all that, and clears up."""
        if verdict.agreed:
            self._delete(self._key("digest", self._rank))
        self._store.add(self._calls_of(self._rank), 1)
        self._delete(self._key("here", self._rank))
        done = self._store.add(self._key("done"), 1)
        if not self._leads:
            return
        present = sum(map(len, verdict.groups))
        until = clock.now() + LINGER_S
        pauses = self.pauses()
        while done < present and clock.now() < until:
            yield next(pauses)
            done = self._store.add(self._key("done"), 0)
        if verdict.agreed and done >= present:
            for name in (
                ("holders", digest),
                ("statement", digest),
                *((n,) for n in ("kinds", "judges", "judge", "begun")),
            ):
                self._delete(self._key(*name))
            self._delete(self._key("verdict"))
            self._delete(self._key("done"))

    def _key(self, *parts: object) -> str:
        return self._key_of(self._number, *parts)

    def _key_of(self, number: int, *parts: object) -> str:
        return "/".join(map(str, (self._prefix, number, *parts)))

    def _read(self) -> RanksVerdict:
        return decode(self._store.get(self._key("verdict")), self._ranks)

    def _all_are_here(self) -> bool:
        while self._waiting_for:
            batch = self._waiting_for[:BATCH]
            if not self._store.check([self._key("digest", rank) for rank in batch]):
                return False
            del self._waiting_for[:BATCH]
        return True

    def _frame(self) -> dict[str, Any]:
        return {"size": len(self._ranks), "number": self._number, "timeout": self._timeout}

    def _judge(self) -> dict[str, Any]:
        """Return the verdict on what is in the store."""
        batches = [self._ranks[start : start + BATCH] for start in range(0, len(self._ranks), BATCH)]
        missing = [rank for batch in batches for rank in self._absent(batch)]
        gone = frozenset(missing)
        holders: dict[str, list[int]] = {}
        for batch in batches:
            here = [rank for rank in batch if rank not in gone]
            found = self._get_all([self._key("digest", rank) for rank in here])
            for rank, digest in zip(here, found, strict=True):
                holders.setdefault(digest, []).append(rank)
        if len(holders) == 1 and not missing:
            # All that anybody needs to know; the list of all ranks would be the largest message of the exchange.
            return self._frame()
        kinds = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
        read = {digest: self._statement_of(digest) for digest, _ in kinds}
        known = [(ranks, each) for digest, ranks in kinds if not isinstance(each := read[digest], str)]
        unread = [(ranks, each) for digest, ranks in kinds if isinstance(each := read[digest], str)]
        unread = _within(MOST_STATEMENTS - len(known), unread)
        return {
            **self._frame(),
            "groups": [differences.ranges(ranks) for ranks, _ in [*known, *unread]],
            "examples": [[each["rank"], each["host"]] for _, each in known],
            "differences": _differences([each["statement"] for _, each in known], [why for _, why in unread]),
            "missing": differences.ranges(missing),
            "calls": [self._calls(rank) for rank in missing[:MOST_ASKED]],
        }

    def _absent(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks whose digest is not there, asking about halves of them."""
        if not ranks or self._store.check([self._key("digest", rank) for rank in ranks]):
            return []
        if len(ranks) == 1:
            return list(ranks)
        half = len(ranks) // 2
        return [*self._absent(ranks[:half]), *self._absent(ranks[half:])]

    def _get_all(self, keys: list[str]) -> list[str]:
        many: Callable[[list[str]], list[bytes]] | None = getattr(self._store, "multi_get", None)
        if many is not None and keys:
            with contextlib.suppress(RuntimeError):  # a store may not have it, and only trying tells
                return [_digest(value) for value in many(keys)]
        return [_digest(self._store.get(key)) for key in keys]

    def _statement_of(self, digest: str) -> dict[str, Any] | str:
        """Return what the first rank with a digest said of itself, or why that cannot be read."""
        key = self._key("statement", digest)
        if not self._store.check([key]):
            return _NOT_TOLD
        try:
            told = _unpack(self._store.get(key))
            _demand(type(told["rank"]) is int and told["rank"] in self._ranks and isinstance(told["host"], str))
            if "unreadable" in told:
                return f"{_UNREADABLE}: {_shortened(_text(told['unreadable']))}"
            statement.checked(told["statement"])
        except KeyError as error:
            return f"{_UNREADABLE}: it has no {error}"
        except ValueError as error:
            return f"{_UNREADABLE}: {_shortened(str(error))}"
        return told

    def _calls(self, rank: int) -> int:
        """Return how often a rank has called, this time included."""
        key = self._calls_of(rank)
        ended = self._store.add(key, 0) if self._store.check([key]) else 0
        return ended + self._store.check([self._key("here", rank)])

    def _delete(self, key: str) -> None:
        delete: Callable[[str], Any] | None = getattr(self._store, "delete_key", None)
        if delete is not None:
            with contextlib.suppress(RuntimeError):  # what stays costs the store a few bytes
                delete(key)


_NOT_TOLD, _UNREADABLE, _OTHERS = "not in the store", "unreadable", "others, not listed"
_LONGEST_REASON = 200


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]} ..."


def _within(most: int, unread: Sequence[tuple[list[int], str]]) -> list[tuple[list[int], str]]:
    """Return kinds of statements that could not be read, one group each, but for those beyond a number: they share one."""
    beyond = sorted(rank for ranks, _ in unread[most:] for rank in ranks)
    return [*unread[:most], *([(beyond, _OTHERS)] if beyond else [])]


def _differences(statements: Sequence[Mapping[str, Any]], unread: Sequence[str]) -> list[list[Any]]:
    """Return what differs, with groups by number: each list of ranks is sent once, not once for every value.

    Ranks whose statement cannot be read never agree with others: that their digests differ is all that is known.

    Args:
        statements: those that were read.
        unread: for each other group, in order, why its statement was not.
    """
    numbers = tuple(range(len(statements)))
    found = list(
        differences.find([StatementGroup(each, (number,)) for number, each in zip(numbers, statements, strict=True)])
    )
    values: list[tuple[str, tuple[int, ...]]] = []
    if unread:
        several = len(unread) > 1
        values = [("read", numbers)] if numbers else []
        values += [
            (f"{why} (kind {number + 1})" if several and why != _OTHERS else why, (number,))
            for number, why in enumerate(unread, len(statements))
        ]
    elif len(statements) > 1 and not found:
        values = [(f"kind {number + 1}", (number,)) for number in numbers]
    if values:
        found.append(Difference(differences.PACKAGE, "statement", tuple(values), _ADVICE_UNREAD if unread else _ADVICE))
    return [[each.subject, each.field, [[v, list(who)] for v, who in each.values], each.advice] for each in found]


_ADVICE = "resolve what else is listed and run again; if nothing else is, report it"
_ADVICE_UNREAD = (
    "these ranks differ, and why cannot be told: resolve what else is listed, compare what megacpp_overlays.audit() "
    "prints on them, and report it if that is the same"
)


def _digest(value: bytes) -> str:
    """Return a short word that a rank left."""
    return value[:64].decode(errors="replace")


def encode(told: Mapping[str, Any]) -> str:
    """Return plain data as a value of the store."""
    return base64.b64encode(zlib.compress(_as_json(told))).decode()


def _as_json(told: Mapping[str, Any]) -> bytes:
    return json.dumps(told, separators=(",", ":")).encode()


class PayloadError(ValueError):
    """Raised for a value of the store that no rank of this package leaves there."""


def _unpack(packed: bytes) -> dict[str, Any]:
    """Return the plain data of a value of the store.

    Raises:
        PayloadError: it is none, or larger than any of ours.
    """
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(base64.b64decode(packed[:MOST_BYTES], validate=True), MOST_BYTES)
        if not unpacker.eof:
            raise PayloadError(f"it is cut off, or larger than {MOST_BYTES} bytes")
        told = json.loads(text)
    except (ValueError, zlib.error, RecursionError) as error:
        raise PayloadError(f"it cannot be unpacked: {type(error).__name__}: {error}") from error
    if not isinstance(told, dict):
        raise PayloadError(f"it is of type {type(told).__name__}")
    return told


def _numbers(text: Any, ranks: frozenset[int]) -> tuple[int, ...]:
    """Return what `differences.ranges` wrote about some of these ranks."""
    _demand(isinstance(text, str))
    found: list[int] = []
    for part in filter(None, text.split(", ")):
        ends = [int(end) for end in part.split("-")]
        _demand(ends[0] in ranks and ends[-1] in ranks and len(ends) <= 2)
        found += [number for number in range(ends[0], ends[-1] + 1) if number in ranks]
        _demand(len(found) <= len(ranks))
    return tuple(found)


def _demand(holds: bool) -> None:
    if not holds:
        raise ValueError("something in it is not what a verdict has there")


def _text(value: Any) -> str:
    _demand(isinstance(value, str))
    return str(value)


def _number(value: Any) -> int:
    _demand(type(value) is int)
    return int(value)


def decode(packed: bytes, ranks: tuple[int, ...]) -> RanksVerdict:
    """Return the verdict that a value of the store holds, about these ranks.

    Raises:
        PayloadError: it holds none.
    """
    told = _unpack(packed)
    try:
        return _verdict(told, frozenset(ranks))
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise PayloadError(f"it is no verdict: {type(error).__name__}: {error}") from error


def _verdict(told: Mapping[str, Any], ranks: frozenset[int]) -> RanksVerdict:
    everybody = "groups" not in told and not told.get("failure")
    groups = (tuple(sorted(ranks)),) if everybody else tuple(_numbers(text, ranks) for text in told.get("groups", []))
    _demand(sum(map(len, groups)) <= len(ranks))
    found, calls = told.get("differences", []), told.get("calls", [])
    _demand(len(found) <= MOST_DIFFERENCES)
    _demand(type(told["timeout"]) in {int, float})

    def holders(values: Sequence[tuple[str, Sequence[int]]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        # Each group holds one value, so a list of values is never longer than all ranks.
        named = [number for _, who in values for number in who]
        _demand(len(named) == len(set(named)) and all(type(number) is int and number >= 0 for number in named))
        held = [
            (_text(value), tuple(sorted(rank for number in who for rank in groups[number]))) for value, who in values
        ]
        return tuple(sorted(held, key=lambda item: -len(item[1])))

    return RanksVerdict(
        size=_number(told["size"]),
        number=_number(told["number"]),
        timeout=told["timeout"],
        groups=groups,
        examples=tuple(Example(_number(rank), _text(host)) for rank, host in told.get("examples", [])),
        differences=tuple(
            Difference(_text(subject), _text(field), holders(values), _text(advice))
            for subject, field, values, advice in found
        ),
        missing=tuple(
            (rank, _number(calls[place]) if place < len(calls) else None)
            for place, rank in enumerate(_numbers(told.get("missing", ""), ranks))
        ),
        failure=_text(told.get("failure", "")),
    )
