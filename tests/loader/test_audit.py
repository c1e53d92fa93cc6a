"""The audit: a table for people, JSON for machines, a fingerprint for ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from made_up import FIXED_TEXT, Upstream

from megacpp_overlays.loader.audit import Audit
from megacpp_overlays.loader.session import Session
from megacpp_overlays.model import Decision, Evidence, Finding, Verdict

SessionMaker = Callable[..., Session]


@pytest.fixture
def audit(upstream: Upstream, session: SessionMaker) -> Audit:
    current = session(upstream.overlay())
    current.arm()
    upstream.load()
    return current.audit()


def test_the_table_says_what_why_how_to_switch_it_off_and_when_it_goes(audit: Audit, upstream: Upstream) -> None:
    table = str(audit)

    head, row = table.splitlines()[2], table.splitlines()[4]
    assert head.split() == ["overlay", "pack", "decision", "verdict", "shape", "target"]
    assert row.split()[:5] == ["double-fix", "99", "active", "BROKEN", "off-by-one"]
    for text in (
        f"replaced: {upstream.module_name}.double",
        "without it: every double is one too large",
        "off: MEGACPP_OVERLAY_DOUBLE_FIX=off",
        "delete when: upstream doubles without adding one",
        audit.fingerprint,
    ):
        assert text in table


def test_the_table_is_aligned_and_has_no_trailing_spaces(audit: Audit) -> None:
    lines = str(audit).splitlines()

    assert lines[2].index("decision") == lines[4].index("active")
    assert all(line == line.rstrip() for line in lines)


def test_json_round_trips_with_stable_keys(audit: Audit) -> None:
    data = json.loads(audit.to_json())

    assert data == audit.as_dict()
    assert (data["schema"], data["package"], data["mode"]) == (1, "megacpp_overlays", "auto")
    assert list(data["decisions"][0]) == [
        "id",
        "pack",
        "decision",
        "verdict",
        "shape",
        "distribution",
        "version",
        "target",
        "reason",
        "proof",
        "repair",
        "looks_repaired",
        "evidence",
        "source_sha256",
        "seams",
        "rebound",
        "retire_when",
        "variable",
    ]


def test_the_fingerprint_is_the_same_for_the_same_code_in_another_folder(audit: Audit) -> None:
    record = audit.records[0]
    moved = replace(record, version="unversioned, loaded from /elsewhere/layers.py", reason="another path")

    assert replace(audit, records=(moved,)).fingerprint == audit.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"decision": Decision.DISABLED},
        {"version": "0.19.3"},
        {"source_sha256": "0" * 64},
        {"finding": Finding(verdict=Verdict.UNRECOGNISED, shape=None, evidence=(Evidence(seen="x"),))},
    ],
    ids=["decision", "version", "source", "verdict"],
)
def test_the_fingerprint_changes_with_what_matters(audit: Audit, change: dict[str, object]) -> None:
    changed = replace(audit, records=(replace(audit.records[0], **change),))  # type: ignore[arg-type]

    assert changed.fingerprint != audit.fingerprint
    assert replace(audit, mode="observe").fingerprint != audit.fingerprint
    assert replace(audit, version="9.9").fingerprint != audit.fingerprint


def test_a_target_that_is_not_installed_is_absent_and_one_that_waits_is_armed(
    upstream: Upstream, session: SessionMaker, tmp_path: Path
) -> None:
    current = session(upstream.overlay())
    current.arm()
    assert current.audit().records[0].decision is Decision.ARMED

    (tmp_path / upstream.name / "layers.py").unlink()
    record = current.audit().records[0]

    assert record.decision is Decision.ABSENT
    assert record.reason == f"{upstream.name} is not installed"


@pytest.mark.parametrize("damage", ["codec", "loop", "compiled"])
def test_a_target_that_is_there_and_cannot_be_read_is_a_conflict_and_not_absent(
    upstream: Upstream, session: SessionMaker, tmp_path: Path, damage: str
) -> None:
    current = session(upstream.overlay())
    current.arm()
    path = tmp_path / upstream.name / "layers.py"
    path.unlink()
    if damage == "codec":
        path.write_text("# coding: no-such-codec\n")
    elif damage == "loop":
        path.symlink_to(path)
    else:
        path.with_suffix(".pyc").touch()

    record = current.audit().records[0]

    assert (record.decision, record.verdict) == (Decision.CONFLICT, "UNRECOGNISED")
    assert f"{upstream.module_name} cannot be read: " in record.reason
    assert "layers." in record.reason


def test_a_module_that_an_installed_distribution_does_not_have_is_absent(
    upstream: Upstream, session: SessionMaker
) -> None:
    target = upstream.overlay().target._replace(distribution="pytest", module="pytest.no_such_module")
    current = session(upstream.overlay(target=target))
    current.arm()

    record = current.audit().records[0]

    assert record.decision is Decision.ABSENT
    assert record.version == pytest.__version__
    assert f"pytest {pytest.__version__} has no pytest.no_such_module" in record.reason


def test_a_retired_overlay_says_so(upstream: Upstream, session: SessionMaker) -> None:
    upstream.write(FIXED_TEXT)
    current = session(upstream.overlay())
    current.arm()
    upstream.load()

    assert "retired" in str(current.audit())
    assert current.audit().conflicts == ()
