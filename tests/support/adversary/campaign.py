"""Campaign of many mutants, the same for the same seed, and a table of the findings about them."""

from __future__ import annotations

import multiprocessing
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random

from adversary.bases import Base, Place
from adversary.judging import VIOLATIONS, Judgement, Known, body, judge
from adversary.mutants import KINDS, Mutant, mutants, mutants_of_c
from adversary.outline import Outline
from megacpp_overlays.model import Verdict

CHUNK = 2 * len(KINDS)
"""Mutants of one text that come one after the other, so that it is parsed once: two of each class."""
SHOWN = 5
"""Offenders of each kind that are shown in full."""


def known_bodies(bases: Iterable[Base]) -> Known:
    """Return the code of the bodies that verdicts depend on, by part and place: a mutant may have the body of another release."""
    found: defaultdict[tuple[str, Place], set[tuple[str, ...]]] = defaultdict(set)
    outlines: dict[str, Outline] = {}
    for base in bases:
        for place in base.bodies | base.repair:
            text = base.tree.texts.get(place.module)
            if text is not None and place.symbol:
                outline = outlines.get(text) or outlines.setdefault(text, Outline(text))
                found[base.name, place].add(body(outline, place.symbol))
    return {key: frozenset(bodies) for key, bodies in found.items()}


def judged(
    bases: Sequence[Base], count: int, seed: int, *, turn: int = 0, turns: int = 1, chunk: int = CHUNK
) -> Iterator[Judgement]:
    """Yield the judgements of so many mutants, the parts of overlays by turns.

    Args:
        bases: the trees to mutate, with the findings there.
        count: how many mutants there are for all turns together.
        seed: the same one gives the same mutants.
        turn: which of several processes this is.
        turns: how many there are.
        chunk: mutants of one text that come one after the other.
    """
    by_part: defaultdict[str, list[Base]] = defaultdict(list)
    for base in bases:
        by_part[base.name].append(base)
    parts = sorted(by_part)
    numbers = range(turn, -(-count // chunk), turns)
    asked = {parts[number % len(parts)] for number in numbers}
    known = known_bodies(base for base in bases if base.name in asked)
    for number in numbers:
        rng = Random(f"{seed}/{number}")
        base = _chosen(by_part[parts[number % len(parts)]], rng)
        for where, mutant in islice(_mutants(base, rng), min(chunk, count - number * chunk)):
            yield judge(base, where, mutant, known)


def _chosen(bases: Sequence[Base], rng: Random) -> Base:
    """Return a base: one that is broken or fixed, as a rule, each verdict as often as the other."""
    verdicts = {base.finding.verdict for base in bases}
    telling = verdicts & {Verdict.BROKEN, Verdict.FIXED}
    wanted = sorted(telling if telling and rng.random() < 0.9 else verdicts, key=lambda each: each.value)
    verdict = rng.choice(wanted)
    return rng.choice([base for base in bases if base.finding.verdict is verdict])


def _mutants(base: Base, rng: Random) -> Iterator[tuple[str | tuple[str, str], Mutant]]:
    """Yield mutants of one text that a probe read: that of the target in half of the cases."""
    texts = {name: text for name, text in base.tree.texts.items() if text}
    files = {place: file.text for place, file in base.tree.files.items() if file is not None}
    target = base.part.target.module
    if files and (not texts or rng.random() < 0.5):
        place = rng.choice(sorted(files))
        yield from ((place, mutant) for mutant in mutants_of_c(files[place], rng))
    if not texts:
        return
    where = target if texts.get(target) and rng.random() < 0.5 else rng.choice(sorted(texts))
    near = [base.part.target.symbol] if where == target else []
    near += [each.symbol for each in sorted(base.bodies | base.repair | base.seams, key=str) if each.module == where]
    try:
        yield from ((where, mutant) for mutant in mutants(texts[where], rng, near))
    except (SyntaxError, ValueError):
        return  # a text for another Python


@dataclass
class Row:
    """Counts of the findings about mutants of one part."""

    kinds: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)
    equal: int = 0
    tripped: int = 0
    slowest: float = 0.0

    def add(self, each: Judgement) -> None:
        """Count one judgement."""
        self.kinds[each.mutant.kind] += 1
        self.verdicts[each.verdict.value if each.verdict else "-"] += 1
        if each.violation:
            self.violations[each.violation] += 1
        self.equal += each.is_equal
        self.tripped += each.tripped
        self.slowest = max(self.slowest, each.milliseconds)

    def join(self, other: Row) -> None:
        """Add the counts of another process."""
        for name in ("kinds", "verdicts", "violations"):
            getattr(self, name).update(getattr(other, name))
        self.equal += other.equal
        self.tripped += other.tripped
        self.slowest = max(self.slowest, other.slowest)


@dataclass
class Outcome:
    """Counts of the findings about all mutants, with the first offenders."""

    rows: dict[str, Row] = field(default_factory=dict)
    offenders: dict[str, list[str]] = field(default_factory=dict)
    tripped: dict[str, str] = field(default_factory=dict)

    def add(self, each: Judgement) -> None:
        """Count one judgement, and keep the first offenders of each kind."""
        self.rows.setdefault(each.base.name, Row()).add(each)
        if each.violation:
            kept = self.offenders.setdefault(each.violation, [])
            if len(kept) < SHOWN or not any(f": {each.base.name} on" in text for text in kept):
                kept.append(each.report())

    def join(self, other: Outcome) -> None:
        """Add the counts of another process."""
        for name, row in other.rows.items():
            self.rows.setdefault(name, Row()).join(row)
        for kind, texts in other.offenders.items():
            self.offenders.setdefault(kind, []).extend(texts)

    @property
    def violations(self) -> Counter[str]:
        """Return the number of violations of each kind."""
        return sum((row.violations for row in self.rows.values()), Counter())

    def table(self, bases: Sequence[Base]) -> str:
        """Return a line for each part: mutants by class, verdicts, violations, and the slowest answer."""
        trees, read = Counter(base.name for base in bases), defaultdict[str, int](int)
        for base in bases:
            read[base.name] = max(read[base.name], len(base.bodies), len(base.repair))
        short = {kind: kind[:4] for kind in KINDS}
        verdicts = [each.value for each in Verdict]
        head = ["part", "trees", "read", "mutants", *short.values(), *(each[:6] for each in verdicts)]
        head += ["equal", "tripped", "installed", "retired", "absent", "raised", "slowest ms"]
        lines = [head]
        for name, row in [*sorted(self.rows.items()), ("all", self._total())]:
            line = [
                name,
                trees[name] or len(bases),
                read[name],
                row.kinds.total(),
                *(row.kinds[kind] for kind in KINDS),
            ]
            line += [row.verdicts[each] for each in verdicts]
            line += [row.equal, row.tripped, *(row.violations[each] for each in VIOLATIONS), f"{row.slowest:.0f}"]
            lines.append([str(each) for each in line])
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        return "\n".join(
            "  ".join(
                text.rjust(width) if n else text.ljust(width)
                for n, (text, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        )

    def _total(self) -> Row:
        total = Row()
        for row in self.rows.values():
            total.join(row)
        return total


def outcome(judgements: Iterable[Judgement]) -> Outcome:
    """Return the counts of judgements."""
    made = Outcome()
    for each in judgements:
        made.add(each)
    return made


_shared: list[tuple[Sequence[Base], int, int, int]] = []
"""The arguments of `run`, which forked processes inherit."""


def _one_turn(turn: int) -> Outcome:
    bases, count, seed, turns = _shared[0]
    return outcome(judged(bases, count, seed, turn=turn, turns=turns))


def run(bases: Sequence[Base], count: int, seed: int, jobs: int) -> Outcome:
    """Judge so many mutants on several CPUs; return the counts."""
    _shared[:] = [(bases, count, seed, jobs)]
    whole = Outcome()
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for each in pool.imap_unordered(_one_turn, range(jobs)):
            whole.join(each)
    return whole
