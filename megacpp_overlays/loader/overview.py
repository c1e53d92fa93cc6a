"""Text form of an audit, for 80 columns: decisions that need attention first, then active overlays, then all others."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from megacpp_overlays import terminal_text
from megacpp_overlays.loader import provenance
from megacpp_overlays.loader.decisions import ATTENTION, TRAITS, WARNED
from megacpp_overlays.loader.fields import Fields, fields
from megacpp_overlays.loader.lines import WITNESS, by_overlay, calls, counted
from megacpp_overlays.model import Decision, Record

WIDTH = 79
"""Most columns of a line: some terminals wrap at 80."""

_QUIET = {each: TRAITS[each].word or each.value for each in (Decision.ARMED, Decision.ABSENT, Decision.DISABLED)}


class Line(NamedTuple):
    """A line of text, with its decision as the key of its colour; the key is empty for a plain line."""

    text: str
    about: str = ""


def short(
    version: str,
    mode: str,
    fingerprint: str,
    records: Sequence[Record],
    hub_copies: Sequence[str] = (),
    unconcerned: Collection[str] = (),
) -> list[Line]:
    """Return the lines of an audit: a few for each decision that needs attention or is active, one for each group of the others.

    Args:
        version: of this package.
        mode: of this process.
        fingerprint: of the audit.
        records: its decisions.
        hub_copies: sentences about copies of upstream code that overlays do not reach.
        unconcerned: ids of active overlays that do not concern the model; they are counted and not listed.
    """
    return [
        *_head(version, mode, fingerprint, records),
        *_attention(records),
        *_out_of_reach(hub_copies),
        *_active(records, unconcerned),
        *_quiet(records),
    ]


def full(
    version: str, mode: str, fingerprint: str, records: Sequence[Record], hub_copies: Sequence[str] = ()
) -> list[Line]:
    """Return the lines of an audit with all details of each decision, in the same order."""
    lines = [*_head(version, mode, fingerprint, records), *_out_of_reach(hub_copies)]
    for decision in (*WARNED, Decision.ACTIVE, Decision.RETIRED, *_QUIET):
        chosen = [record for record in records if record.decision is decision]
        if chosen:
            lines += [Line(""), _heading(_QUIET.get(decision, decision.value), decision)]
        for record in chosen:
            lines += [Line(f"  {_title(fields(record))}"), *_plain(_notes(record))]
    return lines


def _head(version: str, mode: str, fingerprint: str, records: Sequence[Record]) -> list[Line]:
    head = f"megacpp_overlays {version}   mode {mode}   fingerprint {fingerprint}"
    known = provenance.counted(records)
    return [Line(head), *_plain(wrapped(counted(records), "", "")), *_plain(wrapped(known, "", "") if known else ())]


def _attention(records: Sequence[Record]) -> Iterable[Line]:
    chosen = [record for decision in ATTENTION for record in records if record.decision is decision]
    waiting = [record for record in records if record.decision is Decision.UNPROVED]
    if not chosen and not waiting:
        return
    yield Line("")
    yield _heading("needs attention", Decision.CONFLICT if chosen else Decision.UNPROVED)
    active = {record.overlay.id for record in records if record.decision is Decision.ACTIVE}
    for record in chosen:
        overlay, found = record.overlay, fields(record)
        yield Line(f"  {record.decision.value}: {_title(found)}", record.decision.value)
        notes = [
            found.reason,
            found.effect,
            "it is active in another module" if overlay.id in active else "",
            f"more: megacpp-overlays audit {overlay.id}" if record.decision is Decision.CONFLICT else "",
            f"off: {found.off}",
        ]
        yield from _plain(_indented(notes))
    yield from _unproved(waiting)


def _unproved(waiting: Sequence[Record]) -> Iterable[Line]:
    """Yield for each release the number and the ids of overlays that are unproved on it, and the one command for all of them."""
    releases = dict.fromkeys((each.overlay.target.distribution, each.version) for each in waiting)
    for distribution, version in releases:
        chosen = [
            each for each in waiting if (each.overlay.target.distribution, each.version) == (distribution, version)
        ]
        names = list(dict.fromkeys(each.overlay.id for each in chosen))
        text = f"  unproved: {len(names)} on {distribution} {version or ''}".rstrip()
        yield Line(text, Decision.UNPROVED.value)
        notes = [
            ", ".join(names),
            "not a release that this package knows, and their reproducers have not run on it: nothing is installed",
            f"what to do: {WITNESS}",
        ]
        yield from _plain(_indented(notes))


def _out_of_reach(hub_copies: Sequence[str]) -> Iterable[Line]:
    """Yield the copies of upstream code that overlays do not reach."""
    if hub_copies:
        yield Line("")
        yield Line("out of reach: code from the Hugging Face Hub", Decision.CONFLICT.value)
    for each in hub_copies:
        yield from _plain(wrapped(each, "  ", "      "))


def _active(records: Sequence[Record], unconcerned: Collection[str]) -> Iterable[Line]:
    conflicts = {record.overlay.id for record in records if record.decision is Decision.CONFLICT} | {*unconcerned}
    chosen = {each.overlay.id: each for each in records if each.decision is Decision.ACTIVE}
    chosen = {name: each for name, each in chosen.items() if name not in conflicts}
    if not chosen:
        return
    yield Line("")
    yield _heading("active", Decision.ACTIVE)
    counts = calls(records)
    for name, record in chosen.items():
        overlay, found = record.overlay, fields(record)
        yield Line(f"  {_title(found)}{_unless_release(record)}")
        called = f"; {_called(counts[name])}" if name in counts else ""
        symptom = f"without it: {overlay.symptoms[0]}" if overlay.symptoms else ""
        yield from _plain(_indented([symptom, overlay.title + called, f"delete when {found.deleted}"]))


def _quiet(records: Sequence[Record]) -> Iterable[Line]:
    decided = by_overlay(records)
    retired = {each.overlay.id: each for each in records if each.decision is Decision.RETIRED}
    retired = {name: each for name, each in retired.items() if decided[name] is Decision.RETIRED}
    if retired:
        yield Line("")
        yield _heading("retired: upstream is right here, without it", Decision.RETIRED)
        for record in retired.values():
            yield from _plain(wrapped(f"{_title(fields(record))}{_unless_release(record)}", "  ", "      "))
    names = {decision: [name for name, each in decided.items() if each is decision] for decision in _QUIET}
    if any(names.values()):
        yield Line("")
    for decision, word in _QUIET.items():
        if names[decision]:
            yield from _plain(wrapped(", ".join(names[decision]), f"{word:8}", " " * 8))


def _title(found: Fields) -> str:
    return f"{found.name}, {found.installed}"


def _unless_release(record: Record) -> str:
    """Return the basis of a verdict, unless it is a known release."""
    found = provenance.of_note(record)
    return "" if found in {None, provenance.Provenance.RELEASE} else f", proved by: {found.value}"


def _called(count: int) -> str:
    return {0: "not called so far", 1: "called once"}.get(count, f"called {count:,} times")


def _notes(record: Record) -> list[str]:
    """Return all details of a decision."""
    found, module, known = fields(record), record.overlay.target.module, provenance.of_note(record)
    counted_calls = record.calls if calls([record]) else ()
    return _indented(
        [
            found.verdict + (f", proved by: {known.value}" if known else ""),
            found.reason,
            found.effect,
            f"replaced in {module}: {', '.join(found.seams)}" if found.seams else "",
            *(f"{name.removeprefix(f'{module}.')} {_called(count)}" for name, count in counted_calls),
            f"off: {found.off}" if found.off else "",
            f"delete when: {found.deleted}" if found.deleted else "",
        ]
    )


def _heading(text: str, decision: Decision) -> Line:
    return Line(text, decision.value)


def _plain(texts: Iterable[str]) -> Iterable[Line]:
    return [Line(text) for text in texts]


def _indented(notes: Iterable[str]) -> list[str]:
    return [line for note in notes if note for line in wrapped(note, "      ", "        ")]


def wrapped(text: str, first: str, others: str) -> list[str]:
    """Return a text wrapped to `WIDTH` columns, with a prefix for the first line and one for the others."""
    return textwrap.wrap(
        terminal_text.one_line(text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_on_hyphens=False,
    )
