"""`megacpp-overlays compare`: the changes between two kept audits, and errors for files that are no audit."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import FIXED_TEXT, Upstream

from megacpp_overlays.cli import main
from megacpp_overlays.upkeep import audit_diff

SessionMaker = Callable[..., Any]
Audit = dict[str, Any]


@pytest.fixture
def audit(upstream: Upstream, session: SessionMaker) -> Audit:
    """Return the audit of a process in which one made-up overlay is active."""
    made = session(upstream.overlay())
    made.arm()
    upstream.load()
    data: Audit = made.audit().as_dict()
    assert data["decisions"][0]["decision"] == "active"
    return data


def kept(folder: Path, name: str, data: object) -> str:
    path = folder / name
    path.write_text(json.dumps(data))
    return str(path)


def test_an_audit_is_the_same_as_itself(audit: Audit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = kept(tmp_path, "a.json", audit)

    assert main(["compare", one, one]) == 0
    assert capsys.readouterr().out == "Nothing has changed.\n"


def test_an_upgrade_is_reported_with_its_cause_and_its_consequence(
    audit: Audit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = copy.deepcopy(audit)
    later["decisions"][0].update(version="2.0", source_sha256="0" * 64, verdict="FIXED", decision="retired", seams=[])

    code = main(["compare", kept(tmp_path, "a.json", audit), kept(tmp_path, "b.json", later)])

    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert code == 1
    assert {row[0] for row in rows} == {"double-fix"}
    assert [row[1] for row in rows] == ["version", "source_sha256", "verdict", "decision", "seams"]
    assert rows[3] == ["double-fix", "decision", "active", "retired"]


def test_programs_get_the_same_as_json(audit: Audit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    later = {**copy.deepcopy(audit), "mode": "strict"}

    code = main(["compare", "--json", kept(tmp_path, "a.json", audit), kept(tmp_path, "b.json", later)])

    change = {"subject": "megacpp_overlays", "what": "mode", "before": "auto", "after": "strict"}
    assert (code, json.loads(capsys.readouterr().out)) == (1, {"changes": [change], "hidden": False})


def test_a_real_change_of_the_source_is_seen(audit: Audit, upstream: Upstream, session: SessionMaker) -> None:
    upstream.write(FIXED_TEXT)
    sys.modules.pop(upstream.module_name)
    made = session(upstream.overlay())
    made.arm()
    upstream.load()

    found = audit_diff.changes(audit, made.audit().as_dict())

    assert {"source_sha256", "verdict", "decision", "seams"} <= {change.what for change in found}


@pytest.mark.parametrize(
    "change",
    [
        {"reason": "other words"},
        {"evidence": ["seen elsewhere"]},
        {"rebound": ["somewhere.alias"]},
        {"version": "unversioned, loaded from /elsewhere/layers.py"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_words_and_paths_are_no_changes(audit: Audit, change: dict[str, object]) -> None:
    audit["decisions"][0]["version"] = "unversioned, loaded from /here/layers.py"
    later = copy.deepcopy(audit)
    later["decisions"][0].update(change)

    assert audit_diff.changes(audit, later) == ()


@pytest.mark.parametrize("field", ["version", "source_sha256", "verdict", "shape", "decision", "seams"])
def test_each_field_about_the_running_code_is_a_change_by_itself(audit: Audit, field: str) -> None:
    later = copy.deepcopy(audit)
    later["decisions"][0][field] = ["other"] if field == "seams" else "other"

    assert [change.what for change in audit_diff.changes(audit, later)] == [field]


def test_an_overlay_that_one_run_did_not_have_is_a_change(audit: Audit) -> None:
    later = {**audit, "decisions": []}

    (gone,) = audit_diff.changes(audit, later)
    (come,) = audit_diff.changes(later, audit)

    assert (gone.subject, gone.before, gone.after) == ("double-fix", "active", None)
    assert (come.before, come.after) == (None, "active")


def test_a_change_in_a_part_that_no_audit_shows_is_not_called_nothing(
    audit: Audit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = {**audit, "fingerprint": "0123456789abcdef"}

    code = main(["compare", kept(tmp_path, "a.json", audit), kept(tmp_path, "b.json", later)])

    assert code == 1
    assert "their fingerprints differ" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["audit", "megacpp_overlays", "statement"])
def test_an_audit_is_found_under_the_key_that_a_report_keeps_it_under(audit: Audit, tmp_path: Path, key: str) -> None:
    alone, kept_with_more = kept(tmp_path, "a.json", audit), kept(tmp_path, "b.json", {"loss": 1.0, key: audit})

    assert main(["compare", alone, kept_with_more]) == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[1, 2]", "has no audit"),
        ('{"loss": 1.0}', "has no audit"),
        ('{"schema": 99, "decisions": []}', "has schema 99"),
        ('{"schema": 1, "decisions": [{"id": "double-fix"}]}', "without id, target or decision"),
        ('{"schema": 1, "decisions": [{"id": ["a"], "target": "t", "decision": "active"}]}', "without id, target or"),
        ('{"schema": 1, "decisions": [], "versions": ["a"]}', "versions that are no table"),
        ("[" * 100_000, "is not JSON: it is nested more than 100 levels deep"),
        ('{"schema": 1, "decisions": [], "mode": ' + "[" * 150 + "]" * 150 + "}", "nested more than 100 levels deep"),
    ],
    ids=lambda value: None if value is None else value[:50],
)
def test_a_file_that_is_no_audit_is_named_and_is_not_called_a_difference(
    audit: Audit, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, says: str
) -> None:
    good, bad = kept(tmp_path, "good.json", audit), tmp_path / "bad.json"
    if text is not None:
        bad.write_text(text)

    assert main(["compare", good, str(bad)]) == 2

    error = capsys.readouterr().err
    assert str(bad) in error
    assert says in error


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"mode": 3}, "has no mode in words"),
        ({"decision": "broken"}, "decision of double-fix is no field of an audit"),
        ({"seams": None, "rebound": 1}, "seams, rebound of double-fix"),
        ({"calls": {"a.f": "many"}}, "calls of double-fix"),
    ],
    ids=str,
)
def test_an_audit_that_cannot_be_shown_as_a_page_is_named_and_is_not_called_a_difference(
    audit: Audit, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: dict[str, object], says: str
) -> None:
    decisions = [{**audit["decisions"][0], **wrong}, *audit["decisions"][1:]]
    page, bad = tmp_path / "page.html", kept(tmp_path, "bad.json", {**audit, **wrong, "decisions": decisions})

    assert main(["compare", "--html", str(page), kept(tmp_path, "good.json", audit), bad]) == 2

    assert says in capsys.readouterr().err
    assert not page.exists()


DECISION = st.fixed_dictionaries(
    {
        "id": st.sampled_from(["one-fix", "two-fix", "three-fix"]),
        "target": st.sampled_from(["a.f", "b.g"]),
        "decision": st.sampled_from(["active", "retired", "conflict"]),
        "version": st.sampled_from([None, "1.0", "2.0, but loaded from /x"]),
        "seams": st.lists(st.sampled_from(["a.f", "a.g"]), unique=True),
    }
)
AUDITS = st.lists(DECISION, unique_by=lambda each: (each["id"], each["target"])).map(
    lambda decisions: {"schema": 1, "mode": "auto", "version": "0.1.0", "decisions": decisions}
)


@given(before=AUDITS, after=AUDITS, seed=st.integers())
def test_changes_are_those_of_the_reverse_turned_round_and_order_does_not_matter(
    before: Audit, after: Audit, seed: int
) -> None:
    shuffled = {**after, "decisions": random.Random(seed).sample(after["decisions"], len(after["decisions"]))}

    found = set(audit_diff.changes(before, after))

    assert audit_diff.changes(before, before) == ()
    assert set(audit_diff.changes(before, shuffled)) == found
    assert {(c.subject, c.what, c.after, c.before) for c in audit_diff.changes(after, before)} == {
        tuple(c) for c in found
    }
