"""Recorded findings of the probes for known source texts, so that a launcher need not parse these texts again.

A probe is a function of the source texts that it asks for. The findings of every probe of this package in the releases of its
lanes are recorded in `known.json`, under a hash of all texts that the probe asked for and of the names of missing modules. If
the same texts are installed, the recorded finding is used, and nothing is parsed. Any change of a source text or of the probes'
code since the findings were recorded (`scripts/known_findings.py`) invalidates the entry; the probe then runs.

UNRECOGNISED is never recorded: in that case the probe runs each time.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megacpp_overlays.errors import OverlayError
from megacpp_overlays.loader.ownership import Place, place_of
from megacpp_overlays.model import Body, Erratum, Evidence, Finding, Proof, Reading, ReadingKind, Verdict
from megacpp_overlays.source import knowledge
from megacpp_overlays.source.trees import ModuleSource, SourceTree

FILE = Path(__file__).with_name("known.json")
_PROBES = "megacpp_overlays.feature_probes."
_PACKAGE = Path(__file__).resolve().parents[1]


class KnownFindings(NamedTuple):
    """The content of `known.json`."""

    probes: str
    """Hash of the code of the probes that made the findings."""
    pythons: tuple[str, ...]
    """Versions of Python with the same findings; their parsers differ."""
    parts: dict[str, list[dict[str, Any]]]
    """By part: the modules that the probe asked for, and the number of the finding by the hash of their texts."""
    findings: list[dict[str, Any]]
    readings: list[str]
    """Definitions that findings were read from, as `_written` writes them; a finding names them by number."""


def finding(erratum: Erratum, tree: SourceTree) -> Finding | None:
    """Return the recorded finding of a part, or None if its probe has to run."""
    data = _look_up(erratum, tree)
    return _read(data, tree, _readings(data["read"])) if data is not None else None


def places(erratum: Erratum, tree: SourceTree) -> dict[str, Place]:
    """Return the recorded places of the functions that a part replaces, by symbol; empty if none are recorded."""
    data = _look_up(erratum, tree)
    return {symbol: Place(*each) for symbol, each in data["places"].items()} if data is not None else {}


def read_from(erratum: Erratum) -> tuple[tuple[str, str], ...]:
    """Return the definitions that findings of a part were read from in known releases, by module and symbol."""
    if not erratum.probe.__module__.startswith(_PROBES) or (kept := _kept()) is None:
        return ()
    numbers = {number for row in kept.parts.get(name_of(erratum), ()) for number in row["found"].values()}
    found = [kept.findings[number] for number in sorted(numbers)]
    names = [each for data in found if data["shape"] for each in _readings(data["read"])]
    return tuple(dict.fromkeys((each.module, each.symbol) for each in names))


def _look_up(erratum: Erratum, tree: SourceTree) -> dict[str, Any] | None:
    if not erratum.probe.__module__.startswith(_PROBES) or knowledge.until() or (kept := _kept()) is None:
        return None
    found = look_up(kept.parts.get(name_of(erratum), ()), tree)
    if found is None:
        return None
    data: dict[str, Any] = kept.findings[found.value]
    return data


class KeptRow(NamedTuple):
    """The recorded value for the texts of a tree."""

    asked: tuple[str, ...]
    """Names of the modules that the probe asked for."""
    value: Any


def look_up(rows: Iterable[Mapping[str, Any]], tree: SourceTree) -> KeptRow | None:
    """Return the recorded value for the texts of a tree, or None.

    Args:
        rows: each with the names that were `asked` for, and the values `found` by the digest of their texts.
        tree: the source tree to read.
    """
    for each in rows:
        try:
            sources = [tree.module(name) for name in each["asked"]]
        except OverlayError:
            continue  # the probe will report the unreadable module
        value = each["found"].get(digest(each["asked"], sources))
        if value is not None:
            return KeptRow(tuple(each["asked"]), value)
    return None


def name_of(erratum: Erratum) -> str:
    """Return the key of the findings of a part."""
    return f"{erratum.id} {erratum.target.module}"


def digest(asked: Iterable[str], sources: Iterable[ModuleSource | None]) -> str:
    """Return a digest of the texts of modules, 32 hexadecimal digits. A package and a module of one text differ in it: imports do."""
    rows = [
        f"{name} {Path(source.path).name} {source.sha256}" if source else f"{name} -"
        for name, source in zip(asked, sources, strict=True)
    ]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:32]


def as_data(erratum: Erratum, found: Finding, sources: Sequence[ModuleSource]) -> dict[str, Any] | None:
    """Return a finding as plain data with the places of its seams, or None for a finding that is not recorded."""
    data = portable(found, sources) if found.verdict is not Verdict.UNRECOGNISED else None
    return None if data is None else {**data, "places": _places(erratum, found, sources)}


def portable(found: Finding, sources: Sequence[ModuleSource]) -> dict[str, Any] | None:
    """Return a finding as plain data without paths of its tree, or None if it depends on other files than these sources."""
    names = {source.path: source.name for source in sources}
    files = {each.file for each in found.evidence if each.file is not None}
    says_a_path = any(path in each.seen for each in found.evidence for path in names)
    has_other = any(not isinstance(each, Body) for each in found.repair)
    if files - names.keys() or says_a_path or has_other:
        return None
    return {
        "verdict": found.verdict.value,
        "shape": found.shape,
        "evidence": [[each.seen, names[each.file] if each.file else None, each.line] for each in found.evidence],
        "repair": [[each.module, each.symbol] for each in found.repair if isinstance(each, Body)],
        "proof": found.proof.value if found.proof else None,
        "read": [_written(each) for each in found.read],
    }


def _places(erratum: Erratum, found: Finding, sources: Sequence[ModuleSource]) -> dict[str, Place]:
    source = next((each for each in sources if each.name == erratum.target.module), None)
    symbols = [each.symbol for each in erratum.repairs.get(found.shape or "", ())] if source is not None else []
    written = {symbol: place_of(source, symbol) for symbol in symbols if source is not None}
    return {symbol: place for symbol, place in written.items() if place is not None}


def restored(data: dict[str, Any], tree: SourceTree) -> Finding:
    """Return the finding that `portable` wrote, with the paths of a tree."""
    return _read(data, tree, tuple(map(_reading, data["read"])))


def _read(data: dict[str, Any], tree: SourceTree, read: tuple[Reading, ...]) -> Finding:
    evidence = []
    for seen, name, line in data["evidence"]:
        source = tree.module(name) if name is not None else None
        evidence.append(Evidence(seen, source.path if source else None, line))
    return Finding(
        verdict=Verdict(data["verdict"]),
        shape=data["shape"],
        evidence=tuple(evidence),
        repair=tuple(Body(*each) for each in data["repair"]),
        proof=Proof(data["proof"]) if data["proof"] else None,
        read=read,
    )


def _written(reading: Reading) -> str:
    """Return a reading as one line of words, separated by spaces."""
    words = (reading.module, reading.symbol, reading.kind.value, reading.line, reading.wrappers, reading.origin)
    return " ".join(map(str, words)).rstrip()


def _readings(numbers: str) -> tuple[Reading, ...]:
    """Return the readings of a finding by their numbers."""
    kept = _kept()
    return tuple(_reading(kept.readings[int(each)]) for each in numbers.split()) if kept is not None else ()


def _reading(written: str) -> Reading:
    module, symbol, kind, line, wrappers, *origin = written.split()
    return Reading(module, symbol, ReadingKind(kind), int(line), int(wrappers), *origin)


def numbered(findings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the findings and their shared readings; each finding has the numbers of its readings, as text."""
    readings = {each: None for found in findings for each in found["read"]}
    number = {each: str(place) for place, each in enumerate(readings)}
    rows = [{**found, "read": " ".join(number[each] for each in found["read"])} for found in findings]
    return {"findings": rows, "readings": list(readings)}


@functools.cache
def _kept() -> KnownFindings | None:
    """Return the recorded findings, or None if they are unreadable or of another Python or other code of the probes."""
    try:
        known = KnownFindings(**json.loads(FILE.read_text(encoding="utf-8")))
        is_ours = known.pythons and this_python() in known.pythons and known.probes == code()
    except (OSError, ValueError, TypeError):  # without a readable record the probes run
        return None
    return known if is_ours else None


def this_python() -> str:
    """Return the version of Python that determines its parser: major and minor."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def code() -> str:
    """Return the hash of all code of the probes.

    Raises:
        OSError: the code is not available as text.
    """
    folders = (_PACKAGE / "feature_probes", _PACKAGE / "source")
    files = [path for folder in folders for path in sorted(folder.glob("*.py"))]
    files += [*sorted((_PACKAGE / "source/recorded").glob("*.json")), _PACKAGE / "model.py"]
    found = hashlib.sha256()
    for path in files:
        found.update(f"{path.parent.name}/{path.name}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()
