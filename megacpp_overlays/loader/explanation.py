"""Explanation of one overlay: its defect, the evidence here, the replaced symbols, its switch, its threads, and its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megacpp_overlays.loader.fields import fields, titled
from megacpp_overlays.loader.overview import Line, wrapped
from megacpp_overlays.loader.provenance import of_note
from megacpp_overlays.model import Decision, Overlay, Record

_KEY = 11


def explained(records: Sequence[Record], facts: Sequence[tuple[str, str]] = ()) -> list[Line]:
    """Return the lines that explain one overlay or gate.

    Args:
        records: its records, one for each part.
        facts: further fields after the defect, each with its key: the releases that have it.
    """
    erratum = records[0].overlay
    lines = [Line(f"{titled(erratum)}, {erratum.kind} for {erratum.target.distribution}"), Line("")]
    for number, symptom in enumerate(erratum.symptoms):
        lines += _field("" if number else "symptoms", symptom)
    for key, text in (("does" if erratum.installs else "finds", erratum.title), ("defect", erratum.breaks), *facts):
        lines += _field(key, text)
    for record in records:
        lines += [Line(""), *_part(record)]
    lines += [Line(""), *_field("bears on", erratum.concerns or "not said")]
    lines += [*_field("switch", _switch(records[0]))]
    if isinstance(erratum, Overlay) and erratum.needs:
        lines += _field("needs", ", ".join(erratum.needs))
    lines += _field("deleted", f"when {erratum.retire_when}")
    for number, thread in enumerate(erratum.threads):
        lines += _field("" if number else "threads", f"https://github.com/{thread.repository}/issues/{thread.number}")
        lines += _field("", f"({thread.state})")
    lines += _field("validated", erratum.last_validated)
    return [*lines, *_field("reproduce", f"megacpp-overlays repro {erratum.pack:02}")]


def _part(record: Record) -> Iterator[Line]:
    target, found, texts = record.overlay.target, record.finding, fields(record)
    seen = f": {texts.verdict}" if texts.verdict else ""
    yield from _field("here", f"{record.decision.value} on {texts.installed}{seen}", record.decision.value)
    yield from _field("", target.module)
    yield from _field("", f"  {target.symbol}")
    if found is None or record.decision not in {Decision.ACTIVE, Decision.RETIRED}:
        yield from _field("reason", texts.reason)
    for number, each in enumerate(found.evidence if found else ()):
        yield from _field("" if number else "seen", each.seen)
        if each.file:
            yield from _field("", f"  {_place(each.file)}:{each.line}" if each.line else f"  {_place(each.file)}")
    if (known := of_note(record)) is not None:
        yield from _field("proved by", known.value)
    for number, seam in enumerate(texts.seams):
        yield from _field("" if number else "replaced", seam)
    if texts.effect and record.decision is not Decision.ACTIVE:
        yield from _field("so", texts.effect)


def _place(file: str) -> str:
    """Return the path of a file relative to its `site-packages`; any other path is unchanged."""
    return file.rpartition("/site-packages/")[2]


def _switch(record: Record) -> str:
    variable = record.overlay.variable
    if record.overlay.off_by_default:
        return f"{variable}=on (it is off by default)"
    return f"{variable}=off"


def _field(key: str, text: str, about: str = "") -> list[Line]:
    return [Line(line, about) for line in wrapped(text, f"{key:{_KEY}}", " " * _KEY)]
