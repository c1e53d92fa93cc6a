"""The difference of two kept audits: the changes between two runs.

Ranks must agree, but two runs may differ on purpose. So every change is listed and not only its cause: another
version, and the decision that followed from it. Paths, reasons and evidence are text and do not count as changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megacpp_overlays import json_text
from megacpp_overlays.errors import AuditFileError
from megacpp_overlays.loader.audit import SCHEMA
from megacpp_overlays.model import Decision
from megacpp_overlays.processes.differences import by_target
from megacpp_overlays.source.distributions import without_place

_KEPT_UNDER = ("audit", "megacpp_overlays", "statement")
"""Keys under which trackers, reports and receipts keep an audit."""
_OF_PACKAGE = ("version", "package_sha256", "kernels_sha256", "mode", "python")
_OF_OVERLAY = ("version", "source_sha256", "overlay_sha256", "verdict", "shape", "decision", "seams")


class Change(NamedTuple):
    """One field whose value differs between two audits."""

    subject: str
    """Id of an overlay, or `megacpp_overlays`."""
    what: str
    before: str | None
    after: str | None


def read(path: Path) -> Mapping[str, Any]:
    """Return the audit in a JSON file: `audit().as_dict()`, by itself or under a key of its own, or a receipt.

    Raises:
        AuditFileError: the file has no audit, or one whose schema this version does not know.
    """
    try:
        data = json_text.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AuditFileError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise AuditFileError(f"{path} is not JSON: {error}; keep an audit with audit().to_json()") from error
    audit = _audit_in(data)
    if audit is None:
        keys = " or ".join(_KEPT_UNDER)
        raise AuditFileError(f"{path} has no audit: keep audit().as_dict() as it is, or under the key {keys}")
    if audit.get("schema") != SCHEMA:
        found = audit.get("schema")
        raise AuditFileError(
            f"{path} has schema {found}, and this version reads {SCHEMA}: compare with the one that wrote it"
        )
    if not all(map(_is_decision, audit["decisions"])):
        raise AuditFileError(f"{path} has a decision without id, target or decision in words: it was cut or edited")
    if not isinstance(audit.get("versions", {}), dict):
        raise AuditFileError(f"{path} has versions that are no table: it was cut or edited")
    return audit


def check_page_fields(audit: Mapping[str, Any], path: Path) -> None:
    """Check the types of the fields that a page shows and a comparison does not need.

    Raises:
        AuditFileError: a field is missing or of another type; the message names it.
    """
    for name in ("version", "mode"):
        if not isinstance(audit.get(name), str):
            raise AuditFileError(f"{path} has no {name} in words, so it cannot be shown as a page")
    for each in audit["decisions"]:
        known = {decision.value for decision in Decision}
        calls = each.get("calls", {})
        wrong = {
            "decision": each["decision"] not in known,
            "seams": not isinstance(each.get("seams", []), list),
            "rebound": not isinstance(each.get("rebound", []), list),
            "calls": not isinstance(calls, dict) or not all(type(count) is int for count in calls.values()),
        }
        if names := ", ".join(name for name, is_wrong in wrong.items() if is_wrong):
            raise AuditFileError(f"{path} cannot be shown as a page: {names} of {each['id']} is no field of an audit")


def _is_decision(value: object) -> bool:
    return (
        isinstance(value, dict)
        and all(isinstance(value.get(name), str) for name in ("id", "target", "decision"))
        and isinstance(value.get("version"), str | None)
    )


def _audit_in(data: object) -> Mapping[str, Any] | None:
    if not isinstance(data, dict):
        return None
    inner = [data, *(data[key] for key in _KEPT_UNDER if key in data)]
    return next((each for each in inner if isinstance(each, dict) and isinstance(each.get("decisions"), list)), None)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Change, ...]:
    """Return the changes from one audit to another, the package first. The order of decisions does not matter."""
    return (*_of_package(before, after), *_of_overlays(before, after))


def _of_package(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    # A field that only one of them has is no change: a receipt has more fields than an audit.
    for field in _OF_PACKAGE:
        if field in before and field in after and before[field] != after[field]:
            yield Change("megacpp_overlays", field, _text(before[field]), _text(after[field]))
    shared = before.get("versions", {}).keys() & after.get("versions", {}).keys()
    for name in sorted(shared):
        if before["versions"][name] != after["versions"][name]:
            yield Change(name, "version", _text(before["versions"][name]), _text(after["versions"][name]))


def _of_overlays(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    then, now = by_target(before), by_target(after)
    for key in dict.fromkeys([*then, *now]):
        old, new = then.get(key), now.get(key)
        if old is None or new is None:
            yield Change(key[0], f"decision on {key[1]}", _decision(old), _decision(new))
            continue
        for field in _OF_OVERLAY:
            if field in old and field in new and _value(field, old) != _value(field, new):
                yield Change(key[0], field, _value(field, old), _value(field, new))


def _decision(decision: Mapping[str, Any] | None) -> str | None:
    return None if decision is None else str(decision["decision"])


def _value(field: str, decision: Mapping[str, Any]) -> str | None:
    value = _text(decision[field])
    return without_place(value) if field == "version" else value


def _text(value: object) -> str | None:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or None
    return None if value is None else str(value)


def is_hidden(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return whether the fingerprints differ, which shows a change in data that an audit leaves out."""
    prints = before.get("fingerprint"), after.get("fingerprint")
    return None not in prints and prints[0] != prints[1]
