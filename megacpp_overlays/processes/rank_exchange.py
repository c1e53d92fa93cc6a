"""Protocol by which the ranks of a group compare their statements through a key-value store, without a hang.

    every rank     counts its call and writes its digest; the first rank with a digest writes the whole statement, too
    the leader     waits for all digests and writes the verdict
    every rank     reads the verdict, counts that it did, and returns

A comparison takes O(N) small messages, and the store's host holds O(N) bytes until it ends. No call blocks inside the
store, because a training process shares its connection with watchdogs: a waiting rank polls, seldom enough that a large
world does not flood the one process that answers.

The first rank whose timeout ends does the leader's work with the digests that are there. So a missing leader is one
missing rank among others. The module needs a `Store` and a clock, and not torch.
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
"""Time that a rank waits for the verdict of the judging rank after its own timeout."""
LINGER_S = 10.0
"""Time that the leader, which may host the store, waits for the others to read the verdict."""
LEAST_S, MOST_S = 0.005, 1.0
"""Bounds of the time between two polls of a waiting rank."""
QUESTIONS_PER_S = 20_000
"""Limit on the polls of all waiting ranks together."""

BATCH = 512
"""Keys in one request of the leader."""
MOST_STATEMENTS = 64
"""Kinds of statements that are listed separately. More of them mean that the statement itself is wrong."""
MOST_ASKED = 256
"""Missing ranks whose calls are counted."""
MOST_BYTES = 4 << 20
"""Size of one value of the store, packed or not. A statement has about 20 kB, a verdict on 100,000 ranks less than 1 MB."""
MOST_DIFFERENCES = 1000


class Store(Protocol):
    """Key-value store: the part of `torch.distributed.Store` that is used. `multi_get` and `delete_key` are optional."""

    def set(self, key: str, value: str, /) -> Any:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that exists."""

    def add(self, key: str, value: int, /) -> int:
        """Add to a counter that starts at zero, and return it."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist."""


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
    """One rank of a group with the same statement, and its host."""

    rank: int
    host: str


class RanksVerdict(NamedTuple):
    """Result of a comparison, the same on every rank."""

    size: int
    """Ranks in the group."""
    number: int
    """Number of the comparison, from 1: each rank takes part with its call of that number."""
    timeout: float
    """Timeout of the rank that judged, in seconds."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks with the same statement, the largest group first; groups whose statement could not be read come last. Ranks
    beyond `MOST_STATEMENTS` kinds share one group."""
    examples: tuple[Example, ...]
    """One rank of each group whose statement was read."""
    differences: tuple[Difference, ...]
    missing: tuple[tuple[int, int | None], ...]
    """Ranks without a digest, each with its number of calls; None where that was not counted."""
    failure: str = ""
    """Reason for a comparison without a result."""

    @property
    def agreed(self) -> bool:
        """Whether every rank is there with the same statement."""
        return not self.missing and not self.failure and len(self.groups) == 1


class Exchange:
    """One rank's side of one comparison.

    Args:
        store: shared by all ranks of the group.
        prefix: of all keys; the same on all ranks of the group, and different from that of other groups.
        ranks: all ranks of the group in one order.
        rank: this one.
        timeout: seconds that this rank waits for the others.
    """

    def __init__(self, store: Store, prefix: str, ranks: tuple[int, ...], rank: int, timeout: float) -> None:
        self._store = store
        self._prefix = prefix
        self._ranks = ranks
        self._rank = rank
        self._timeout = timeout
        # The host of the store, rank 0 where it is a rank, must not leave while others still ask.
        self._leads = rank == min(ranks)
        self._waiting_for = list(ranks) if self._leads else []
        self._number = 0
        self._since = 0.0
        self._judged = False

    def run(self, digest: str, statement: Mapping[str, Any], clock: Clock) -> RanksVerdict:
        """Take part in the comparison; return the verdict.

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
        """Yield growing intervals between two polls, in seconds."""
        # All other ranks wait for the one leader, so they share the limit.
        share = LEAST_S if self._leads else len(self._ranks) / QUESTIONS_PER_S
        pause = min(max(share, LEAST_S), MOST_S)
        most = min(20 * pause, MOST_S)
        # Ranks that started together must not poll together.
        spread = 0.75 + (self._rank * 0.618) % 0.5
        while True:
            yield pause * spread
            pause = min(pause * 1.25, most)

    def _arrive(self, digest: str, statement: Mapping[str, Any], now: float) -> None:
        """Write the digest of this rank."""
        self._since = now
        # Counted in the store: a process that replaces another continues its count.
        self._number = self._next_number(digest)
        self._store.set(self._key("begun"), "1")
        # The statement is written before the digest: when all digests are there, so are all statements.
        first_with_it = self._store.add(self._key("holders", digest), 1) == 1
        if first_with_it and self._store.add(self._key("kinds"), 1) <= MOST_STATEMENTS:
            self._store.set(self._key("statement", digest), self._packed(statement))
        self._store.set(self._key("digest", self._rank), digest)

    def _packed(self, statement: Mapping[str, Any]) -> str:
        """Return the statement of this rank as a value of the store; only its size if it is too large to be read."""
        head = {"rank": self._rank, "host": platform.node()}
        data = {**head, "statement": statement}
        size = max(len(_as_json(data)), len(packed := encode(data)))
        return packed if size <= MOST_BYTES else encode({**head, "unreadable": f"{size} bytes, more than {MOST_BYTES}"})

    def _next_number(self, digest: str) -> int:
        """Return the number of the comparison that this call takes part in.

        Calls are counted when they end: after an interrupted call, the next one joins the same comparison, and not one
        that the others will never join. A rank that was found missing joins the comparison that others have begun since.
        So does a rank with a new digest that was interrupted in a comparison which ended with its old digest.
        """
        number = self._store.add(self._calls_of(self._rank), 0) + 1
        while self._store.check([self._key_of(number + 1, "begun")]) or self._ended_with_other_digest(number, digest):
            number = self._store.add(self._calls_of(self._rank), 1) + 1
        return number

    def _ended_with_other_digest(self, number: int, digest: str) -> bool:
        """Note that this rank is here; return whether the comparison ended with another digest of an earlier call."""
        if self._store.add(self._key_of(number, "here", self._rank), 1) == 1:
            return False
        own, verdict = self._key_of(number, "digest", self._rank), self._key_of(number, "verdict")
        return self._store.check([own, verdict]) and self._store.get(own).decode() != digest

    def _calls_of(self, rank: int) -> str:
        return f"{self._prefix}/calls/{rank}"

    def _poll(self, now: float) -> RanksVerdict | None:
        """Return the verdict if it is there; judge if it is up to this rank."""
        if self._store.check([self._key("verdict")]):
            return self._read()
        late = now - self._since - self._timeout
        if not self._judged and (late >= 0 or (self._leads and self._all_are_here())):
            self._judged = True
            if self._store.add(self._key("judges"), 1) == 1:
                self._store.set(self._key("judge"), str(self._rank))
                found = encode(self._judge())
                # A rank that judges too slowly must not replace a failure that others have read meanwhile.
                if not self._store.check([self._key("verdict")]):
                    self._store.set(self._key("verdict"), found)
                return self._read()
        if late >= GRACE_S:
            is_known = self._store.check([self._key("judge")])
            judge = f"rank {_digest(self._store.get(self._key('judge')))}" if is_known else "a rank"
            failure = f"{judge} was about to say what it found, and did not"
            self._store.set(self._key("verdict"), encode({**self._frame(), "failure": failure}))
            return self._read()
        return None

    def _leave(self, digest: str, verdict: RanksVerdict, clock: Clock) -> Iterator[float]:
        """Count that the verdict was read; the leader waits for all ranks and deletes the keys."""
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
            for name in ("holders", "statement"):
                self._delete(self._key(name, digest))
            for name in ("kinds", "judges", "judge", "begun", "verdict", "done"):
                self._delete(self._key(name))

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
        """Return the verdict on the digests and statements in the store."""
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
            # The frame means agreement; a list of all ranks would be the largest message of the exchange.
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
        """Return the ranks without a digest, by bisection."""
        if not ranks or self._store.check([self._key("digest", rank) for rank in ranks]):
            return []
        if len(ranks) == 1:
            return list(ranks)
        half = len(ranks) // 2
        return [*self._absent(ranks[:half]), *self._absent(ranks[half:])]

    def _get_all(self, keys: list[str]) -> list[str]:
        many: Callable[[list[str]], list[bytes]] | None = getattr(self._store, "multi_get", None)
        if many is not None and keys:
            with contextlib.suppress(RuntimeError):  # a store may have the method and not support it
                return [_digest(value) for value in many(keys)]
        return [_digest(self._store.get(key)) for key in keys]

    def _statement_of(self, digest: str) -> dict[str, Any] | str:
        """Return the statement that belongs to a digest with its rank and host, or the reason that it cannot be read."""
        key = self._key("statement", digest)
        if not self._store.check([key]):
            return _MISSING
        try:
            data = _unpack(self._store.get(key))
            _demand(type(data["rank"]) is int and data["rank"] in self._ranks and isinstance(data["host"], str))
            if "unreadable" in data:
                return f"{_UNREADABLE}: {_shortened(_text(data['unreadable']))}"
            statement.checked(data["statement"])
        except KeyError as error:
            return f"{_UNREADABLE}: it has no {error}"
        except ValueError as error:
            return f"{_UNREADABLE}: {_shortened(str(error))}"
        return data

    def _calls(self, rank: int) -> int:
        """Return the number of calls of a rank, the present one included."""
        key = self._calls_of(rank)
        ended = self._store.add(key, 0) if self._store.check([key]) else 0
        return ended + self._store.check([self._key("here", rank)])

    def _delete(self, key: str) -> None:
        delete: Callable[[str], Any] | None = getattr(self._store, "delete_key", None)
        if delete is not None:
            with contextlib.suppress(RuntimeError):  # a key that stays costs a few bytes
                delete(key)


_MISSING, _UNREADABLE, _OTHERS = "not in the store", "unreadable", "others, not listed"
_LONGEST_REASON = 200


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]} ..."


def _within(most: int, unread: Sequence[tuple[list[int], str]]) -> list[tuple[list[int], str]]:
    """Return groups of ranks whose statement could not be read, at most `most`, and one more of all other ranks."""
    beyond = sorted(rank for ranks, _ in unread[most:] for rank in ranks)
    return [*unread[:most], *([(beyond, _OTHERS)] if beyond else [])]


def _differences(statements: Sequence[Mapping[str, Any]], unread: Sequence[str]) -> list[list[Any]]:
    """Return the differences, with numbers of groups for ranks: each list of ranks is sent once, not with every value.

    Ranks whose statement cannot be read never agree with others: their digests differ, and no more is known.

    Args:
        statements: those that were read.
        unread: for each other group, in order, the reason that its statement was not.
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


_ADVICE = "resolve the other differences and run again; if there are none, report it"
_ADVICE_UNREAD = (
    "these ranks differ for an unknown reason: resolve the other differences, compare the output of "
    "megacpp_overlays.audit() on them, and report it if that is the same"
)


def _digest(value: bytes) -> str:
    """Decode a short value: a digest or a rank."""
    return value[:64].decode(errors="replace")


def encode(data: Mapping[str, Any]) -> str:
    """Return plain data as a value of the store."""
    return base64.b64encode(zlib.compress(_as_json(data))).decode()


def _as_json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


class PayloadError(ValueError):
    """Raised for a value of the store that no rank of this package writes."""


def _unpack(packed: bytes) -> dict[str, Any]:
    """Return the plain data of a value of the store.

    Raises:
        PayloadError: it is malformed, or larger than `MOST_BYTES`.
    """
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(base64.b64decode(packed[:MOST_BYTES], validate=True), MOST_BYTES)
        if not unpacker.eof:
            raise PayloadError(f"it is cut off, or larger than {MOST_BYTES} bytes")
        data = json.loads(text)
    except (ValueError, zlib.error, RecursionError) as error:
        raise PayloadError(f"it cannot be unpacked: {type(error).__name__}: {error}") from error
    if not isinstance(data, dict):
        raise PayloadError(f"it is of type {type(data).__name__}")
    return data


def _numbers(text: Any, ranks: frozenset[int]) -> tuple[int, ...]:
    """Parse the output of `differences.ranges` for some of these ranks."""
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
        raise ValueError("a field of it is not that of a verdict")


def _text(value: Any) -> str:
    _demand(isinstance(value, str))
    return str(value)


def _number(value: Any) -> int:
    _demand(type(value) is int)
    return int(value)


def decode(packed: bytes, ranks: tuple[int, ...]) -> RanksVerdict:
    """Return the verdict that a value of the store holds, about these ranks.

    Raises:
        PayloadError: it is no verdict.
    """
    data = _unpack(packed)
    try:
        return _verdict(data, frozenset(ranks))
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise PayloadError(f"it is no verdict: {type(error).__name__}: {error}") from error


def _verdict(data: Mapping[str, Any], ranks: frozenset[int]) -> RanksVerdict:
    agreed = "groups" not in data and not data.get("failure")
    groups = (tuple(sorted(ranks)),) if agreed else tuple(_numbers(text, ranks) for text in data.get("groups", []))
    _demand(sum(map(len, groups)) <= len(ranks))
    found, calls = data.get("differences", []), data.get("calls", [])
    _demand(len(found) <= MOST_DIFFERENCES)
    _demand(type(data["timeout"]) in {int, float})

    def holders(values: Sequence[tuple[str, Sequence[int]]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        # A group has one value of a field, so its values never name more ranks than there are.
        named = [number for _, who in values for number in who]
        _demand(len(named) == len(set(named)) and all(type(number) is int and number >= 0 for number in named))
        held = [
            (_text(value), tuple(sorted(rank for number in who for rank in groups[number]))) for value, who in values
        ]
        return tuple(sorted(held, key=lambda item: -len(item[1])))

    return RanksVerdict(
        size=_number(data["size"]),
        number=_number(data["number"]),
        timeout=data["timeout"],
        groups=groups,
        examples=tuple(Example(_number(rank), _text(host)) for rank, host in data.get("examples", [])),
        differences=tuple(
            Difference(_text(subject), _text(field), holders(values), _text(advice))
            for subject, field, values, advice in found
        ),
        missing=tuple(
            (rank, _number(calls[place]) if place < len(calls) else None)
            for place, rank in enumerate(_numbers(data.get("missing", ""), ranks))
        ),
        failure=_text(data.get("failure", "")),
    )
