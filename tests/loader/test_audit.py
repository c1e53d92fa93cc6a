"""The audit: a table for people, JSON for machines, a fingerprint for ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import warm_python
from made_up import FIXED_TEXT, Upstream
from places import ROOT, UNMEASURED

from megacpp_overlays.loader.audit import Audit
from megacpp_overlays.loader.session import Session
from megacpp_overlays.model import Decision, Evidence, Finding, Proof, Verdict

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


DECISION: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "pack": {"type": "integer"},
        "decision": {"enum": [each.value for each in Decision]},
        "verdict": {"enum": [*(each.value for each in Verdict), "-"]},
        "shape": {"type": ["string", "null"]},
        "distribution": {"type": "string"},
        "version": {"type": ["string", "null"]},
        "target": {"type": "string"},
        "reason": {"type": "string"},
        "proof": {"enum": [*(each.value for each in Proof), None]},
        "repair": {"type": "array", "items": {"type": "string"}},
        "looks_repaired": {"type": "boolean"},
        "evidence": {"type": "array", "items": {"type": "string"}},
        "source_sha256": {"type": ["string", "null"], "pattern": "^[0-9a-f]{64}$"},
        "seams": {"type": "array", "items": {"type": "string"}},
        "rebound": {"type": "array", "items": {"type": "string"}},
        "retire_when": {"type": "string"},
        "variable": {"type": "string", "pattern": "^MEGACPP_OVERLAY_[A-Z0-9_]+$"},
    },
    "additionalProperties": False,
}
SCHEMA_1: dict[str, Any] = {
    "type": "object",
    "properties": {
        "schema": {"const": 1},
        "package": {"const": "megacpp_overlays"},
        "version": {"type": "string"},
        "mode": {"enum": ["auto", "off", "observe", "strict"]},
        "fingerprint": {"type": "string", "pattern": "^[0-9a-f]{16}$"},
        "decisions": {"type": "array", "items": {**DECISION, "required": list(DECISION["properties"])}},
    },
    "required": ["schema", "package", "version", "mode", "fingerprint", "decisions"],
    "additionalProperties": False,
}
"""Schema 1, for as long as `audit.SCHEMA` is 1: checkpoints and trackers hold audits of older versions."""
SMALL = 16 * 1024
"""Bytes of JSON that a checkpoint's metadata and a tracker's config take without a thought."""


@pytest.mark.upstream
def test_a_real_audit_fits_a_checkpoint_and_a_tracker(tmp_path: Path) -> None:
    jsonschema, torch = pytest.importorskip("jsonschema"), pytest.importorskip("torch")
    words = ["-m", "megacpp_overlays", "audit", "--json"]
    done = warm_python.run(
        words, {**os.environ, "MEGACPP_OVERLAYS_LOG": "logging", **UNMEASURED}, after=warm_python.MEGATRON, cwd=ROOT
    )
    data = json.loads(done.stdout)

    torch.save({"overlays": data}, tmp_path / "checkpoint.pt")
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["overlays"]

    assert loaded == data
    jsonschema.validate(data, SCHEMA_1)
    assert len(data["decisions"]) >= 10
    assert len(json.dumps(data)) < SMALL


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
