"""Differences between statements or audits: each with its field, its values, the holders of each value, and advice.

Only root causes are reported: another version explains another source, another source another verdict, and another verdict
another decision. All independent causes are reported together, so that a run does not stop once for each of them.
"""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from megacpp_overlays import terminal_text
from megacpp_overlays.loader.rendering import aligned
from megacpp_overlays.model import variable_for

PACKAGE = "megacpp_overlays"
"""Subject of a difference that concerns no single overlay."""


class StatementGroup(NamedTuple):
    """A statement, and all processes that make it."""

    statement: Mapping[str, Any]
    holders: tuple[Any, ...]
    """Ranks, process ids or file names."""


class Difference(NamedTuple):
    """One value that is not the same everywhere."""

    subject: str
    """Id of an overlay, name of a distribution, or `PACKAGE`."""
    field: str
    values: tuple[tuple[str, tuple[Any, ...]], ...]
    """Each value with its holders; the value with the most holders first."""
    advice: str


class _Field(NamedTuple):
    """A field of a decision that is compared, and the fields before it whose differences explain one in it."""

    name: str
    advice: str
    value: Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
    """From a decision and the statement it is in."""
    explained_by: tuple[str, ...] | None = None
    """None: by every field before it, by the mode and by the package."""
    shown: Callable[[Mapping[str, Any]], str] | None = None
    """The value as a table shows it, where the value itself is too terse."""


def _key(name: str) -> Callable[[Mapping[str, Any], Mapping[str, Any]], Any]:
    return lambda decision, _: decision.get(name)


def _switch(decision: Mapping[str, Any], statement: Mapping[str, Any]) -> str | None:
    off = statement.get("off")
    return None if off is None else "off" if decision["id"] in off else "auto"


def _waits(decision: Mapping[str, Any], _: Mapping[str, Any]) -> bool:
    return bool(decision["decision"] == "armed")


def _is_witnessed(decision: Mapping[str, Any], _: Mapping[str, Any]) -> str:
    return (
        "yes" if decision.get("proof") == "witnessed" else "no"
    )  # receipts and audits of older versions have no proof


def _around(decision: Mapping[str, Any], _: Mapping[str, Any]) -> list[str]:
    return list(decision.get("around") or ())  # receipts and audits of older versions have none


def _with_reason(decision: Mapping[str, Any]) -> str:
    return f"{decision['decision']} ({decision.get('reason') or 'no reason given'})"


_OF_PACKAGE = {
    "version": "install the same megacpp_overlays everywhere",
    "package_sha256": "the version is the same and the files are not: install the same megacpp_overlays everywhere",
    "kernels_sha256": "the kernels are not the same and the rest of the package is: install the same megacpp_overlays everywhere",
    "mode": "give every process the same MEGACPP_OVERLAYS",
    "python": "run every process with the same Python",
}
_EXPLAINED_BY = {"package_sha256": ("version",), "kernels_sha256": ("version", "package_sha256")}
_EXPLAIN_CONSEQUENCES = ("version", "package_sha256", "mode")
_PROBE = "the probe answers differently: compare the imports of {module}, and report it"
_DECLARED = "declared"
_OF_OVERLAY = (
    _Field("overlay_sha256", "install the same plugin everywhere", _key("overlay_sha256"), ()),
    _Field("switch", "set {variable} the same everywhere, or nowhere", _switch, ()),
    _Field("version", "install the same {distribution} everywhere", _key("version"), ()),
    _Field(
        "source_sha256",
        "the version is the same and the file of {module} is not: reinstall {distribution} where it was edited",
        _key("source_sha256"),
        ("version",),
    ),
    _Field(
        "decision",
        "import megacpp_overlays first, and {module} before or after this everywhere; some processes have not "
        "imported it yet",
        _waits,
        shown=_with_reason,
    ),
    _Field(
        "witnessed",
        "the repair was witnessed for one process and not for another: run `megacpp-overlays witness {id}` in each "
        "environment, or give both the folder of one in MEGACPP_OVERLAYS_WITNESSES",
        _is_witnessed,
    ),
    _Field("verdict", _PROBE, _key("verdict")),
    _Field("shape", _PROBE, _key("shape")),
    _Field(
        "decision",
        "the code is the same: look for other code that touches {module} in one process and not in another; the reasons are "
        "next to the values",
        _key("decision"),
        shown=_with_reason,
    ),
    _Field("seams", "report it: equal source, unequal seams", _key("seams")),
    _Field(
        "around",
        "other code wraps, overrides or replaces seams in one process and not in another: look for other patches of {module}",
        _around,
    ),
)
"""From cause to consequence."""


def find(groups: Sequence[StatementGroup]) -> tuple[Difference, ...]:
    """Return the differences between the groups, from cause to consequence."""
    said = [group.statement for group in groups]
    found: list[Difference] = []
    for field, advice in _OF_PACKAGE.items():
        values = [each.get(field) for each in said]
        explained = [[each.get(cause) for cause in _EXPLAINED_BY.get(field, ())] for each in said]
        if _differs(values, explained):
            found.append(_difference(PACKAGE, field, values, groups, advice))
    for name in dict.fromkeys(itertools.chain.from_iterable(each.get("versions", ()) for each in said)):
        values = [each.get("versions", {}).get(name) for each in said]
        if _differs(values):
            found.append(_difference(name, "version", values, groups, f"install the same {name} everywhere"))
    found += _of_settings(groups)
    by_key = [by_target(group.statement) for group in groups]
    found += _of_switches({overlay for key in by_key for overlay, _ in key}, groups)
    for key in dict.fromkeys(itertools.chain.from_iterable(by_key)):
        found += _of_overlay([each.get(key) for each in by_key], groups)
    return tuple(found)


def by_target(statement: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Return the decisions of a statement or an audit, by the overlay and the target that each is about."""
    return {(each["id"], each["target"]): each for each in statement["decisions"]}


def _of_settings(groups: Sequence[StatementGroup]) -> list[Difference]:
    """Return the settings of kernels that differ, unless the package that reads them does."""
    said = [group.statement for group in groups]
    read_by = [[each.get("version"), each.get("package_sha256")] for each in said]
    found = []
    for name in dict.fromkeys(itertools.chain.from_iterable(each.get("settings", ()) for each in said)):
        values = [each.get("settings", {}).get(name) for each in said]
        if _differs(values, read_by):
            found.append(_difference(PACKAGE, name, values, groups, f"set {name} the same everywhere, or nowhere"))
    return found


def _of_switches(decided: Collection[str], groups: Sequence[StatementGroup]) -> list[Difference]:
    """Return the switches that differ although no process has decided anything about their overlays."""
    listed = [group.statement.get("off") for group in groups]
    found = []
    for overlay in sorted(set(itertools.chain.from_iterable(filter(None, listed))) - set(decided)):
        values = [None if off is None else "off" if overlay in off else "auto" for off in listed]
        if _differs(values):
            advice = f"set {variable_for(overlay)} the same everywhere, or nowhere"
            found.append(_difference(overlay, "switch", values, groups, advice))
    return found


_UNDECLARED = "not declared"
"""Value of each field where a process has no decision about an overlay."""


def _of_overlay(decisions: Sequence[Mapping[str, Any] | None], groups: Sequence[StatementGroup]) -> list[Difference]:
    one = next(each for each in decisions if each is not None)
    words = {
        "id": one["id"],
        "variable": one.get("variable"),
        "distribution": one.get("distribution"),
        "module": one.get("module") or one["target"],
    }
    package: list[Any] = [tuple(g.statement.get(name) for name in _EXPLAIN_CONSEQUENCES) for g in groups]
    answers: dict[str, list[Any]] = {"package": package, _DECLARED: [each is not None for each in decisions]}
    found: list[Difference] = []
    if _differs(answers[_DECLARED], [each[:2] for each in package]):
        shown = ["declared" if here else _UNDECLARED for here in answers[_DECLARED]]
        advice = "load the same plugins and the same megacpp_overlays everywhere"
        found.append(_difference(one["id"], _DECLARED, shown, groups, advice))
    for place, field in enumerate(_OF_OVERLAY):
        values = [
            _UNDECLARED if each is None else field.value(each, group.statement)
            for each, group in zip(decisions, groups, strict=True)
        ]
        names = list(answers) if field.explained_by is None else [_DECLARED, *field.explained_by]
        explained = list(zip(*(answers[name] for name in names), strict=True))
        if _differs(values, explained):
            advice = field.advice.format(**words)
            if field.shown is None:
                found.append(_difference(one["id"], field.name, values, groups, advice))
            else:
                held = [_UNDECLARED if each is None else each.get(field.name) for each in decisions]
                shown = [_UNDECLARED if each is None else _plain(field.shown(each)) for each in decisions]
                found.append(_difference(one["id"], field.name, held, groups, advice, shown))
        answers[field.name if field.name not in answers else f"{field.name} {place}"] = values
    return found


def _differs(values: Sequence[Any], explained: Sequence[Any] | None = None) -> bool:
    """Return whether values differ among groups with equal explanations."""
    first: dict[str, Any] = {}
    reasons = [None] * len(values) if explained is None else explained
    return any(first.setdefault(json.dumps(why), value) != value for why, value in zip(reasons, values, strict=True))


def _difference(
    subject: str,
    field: str,
    values: Sequence[Any],
    groups: Sequence[StatementGroup],
    advice: str,
    shown: Sequence[str] | None = None,
) -> Difference:
    texts: dict[str, str] = {}
    holders: dict[str, tuple[Any, ...]] = {}
    for value, text, group in zip(values, shown or map(_plain, values), groups, strict=True):
        key = json.dumps(value)
        texts.setdefault(key, text)  # the first wording of a reason is shown for all
        holders[key] = (*holders.get(key, ()), *group.holders)
    most_first = sorted(holders.items(), key=lambda item: (-len(item[1]), texts[item[0]]))
    return Difference(subject, field, tuple((texts[key], tuple(sorted(who))) for key, who in most_first), advice)


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "-" if value is None else str(value)


def ranges(numbers: Sequence[int]) -> str:
    """Return integers as ranges: `0-3, 7`."""
    ordered = sorted(numbers)
    runs = itertools.groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)


_COLUMNS = ("what", "differs in", "value")
_WIDEST_VALUE = 60
_WIDEST_HOLDERS = 48
_HEX = 64
_SHORT_HEX = 16


def table(found: Sequence[Difference], holders: str = "ranks") -> str:
    """Return differences as a table with aligned columns, for a terminal or a log.

    Args:
        found: the result of `find`.
        holders: heading of the column of holders, such as `ranks`.
    """
    rows: list[tuple[str, ...]] = []
    for alike in _alike(found):
        first = alike[0]
        lines = [line for value, held_by in first.values for line in _lines(value, held_by)]
        for number, (subject, line) in enumerate(itertools.zip_longest(_subjects(alike), lines)):
            rows.append((subject or "", "" if number else first.field, *(line or ("", ""))))
    return "\n".join(aligned((*_COLUMNS, holders), rows))


def advice(found: Sequence[Difference]) -> list[str]:
    """Return the advice on the differences, one line for each cause."""
    lines = []
    for alike in _alike(found):
        first, *more = _subjects(alike)
        also = f" and {len(more)} more" if more else ""
        lines.append(terminal_text.one_line(f"{first}{also}: {alike[0].advice}"))
    return lines


def _alike(found: Sequence[Difference]) -> list[list[Difference]]:
    """Group differences with one cause, such as ten overlays of a package that has another version somewhere."""
    alike: dict[tuple[Any, ...], list[Difference]] = {}
    for each in found:
        alike.setdefault(each[1:], []).append(each)
    return list(alike.values())


def _subjects(alike: Sequence[Difference]) -> list[str]:
    return list(dict.fromkeys(each.subject for each in alike))


def _lines(value: str, holders: Sequence[Any]) -> list[tuple[str, str]]:
    """Return a value and its holders, wrapped side by side."""
    if len(value) == _HEX and set(value) <= set("0123456789abcdef"):
        value = f"{value[:_SHORT_HEX]}..."
    words = textwrap.wrap(value, _WIDEST_VALUE) or [""]
    return [(line, "" if number else who(holders)) for number, line in enumerate(words)]


def who(holders: Sequence[Any]) -> str:
    """Return the holders as text; a list that is too long for a line is cut and ends with their number."""
    numbers = [each for each in holders if isinstance(each, int)]
    text = ranges(numbers) if len(numbers) == len(holders) else ", ".join(map(str, holders))
    if len(text) <= _WIDEST_HOLDERS:
        return text
    return f"{text[:_WIDEST_HOLDERS].rpartition(', ')[0]}, ... ({len(holders)} in all)"
