"""The audit: a table for people, JSON for machines, a fingerprint for ranks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_up import FIXED_TEXT, Upstream

from megacpp_overlays.loader import explanation, overview, rendering
from megacpp_overlays.loader.audit import Audit
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import Settings
from megacpp_overlays.model import Body, Decision, Evidence, Finding, Overlay, Proof, Record, Thread, Verdict
from megacpp_overlays.version import VERSION

SessionMaker = Callable[..., Session]


@pytest.fixture
def audit(upstream: Upstream, session: SessionMaker) -> Audit:
    current = session(upstream.overlay())
    current.arm()
    upstream.load()
    return current.audit()


def test_an_active_overlay_is_listed_with_its_effect_and_its_end(audit: Audit, upstream: Upstream) -> None:
    assert str(audit).splitlines() == [
        f"megacpp_overlays {VERSION}   mode auto   fingerprint {audit.fingerprint}",
        "1 active, 0 retired, 0 conflict",
        "",
        "active",
        *shown(f"  double-fix (pack 99), {upstream.name} {audit.records[0].version}"),
        "      Doubles without adding one.",
        "      delete when upstream doubles without adding one",
    ]


def shown(text: str) -> list[str]:
    """Return a line as it is where it has no space to be broken at."""
    return [text]


def made_up(overlay: Overlay, decision: Decision, **changes: Any) -> Record:
    broken = Finding(verdict=Verdict.BROKEN, shape="off-by-one", evidence=(Evidence(seen="x", file="a.py", line=3),))
    read = {"verdict": Verdict.FIXED, "proof": Proof.READ, "repair": (Body("layers", "double"),), "shape": None}
    finding = replace(broken, **read) if decision is Decision.RETIRED else broken
    named = replace(overlay, id=f"{decision.value}-fix")
    return Record(
        overlay=named, decision=decision, reason=f"it is {decision.value}", finding=finding, version="1", **changes
    )


@pytest.fixture
def mixed(upstream: Upstream) -> Audit:
    """One overlay of each decision, in an order that is not that of their importance."""
    records = tuple(made_up(upstream.overlay(), decision) for decision in (*Decision,))
    return Audit(version="9", mode="auto", settings=Settings(), records=records)


def test_decisions_that_need_a_person_come_first_and_those_that_need_no_action_last(
    mixed: Audit, upstream: Upstream
) -> None:
    lines = str(mixed).splitlines()

    assert lines[1] == "1 active, 1 retired, 1 conflict, 1 unproved, 1 gated, 1 armed, 1 absent, 1 off"
    heads = [line for line in lines[2:] if line and not line.startswith(" ")]
    assert heads == [
        "needs attention",
        "active",
        "retired: upstream is right here, without it",
        "armed   armed-fix",
        "absent  absent-fix",
        "off     disabled-fix",
    ]
    below = lines[lines.index("needs attention") + 1 :]
    assert below[0].startswith("  conflict: conflict-fix (pack 99)")
    assert "      it is conflict" in below
    assert "      more: megacpp-overlays audit conflict-fix" in below
    assert "      off: MEGACPP_OVERLAY_CONFLICT_FIX=off" in below
    unproved = below.index(f"  unproved: 1 on {upstream.overlay().target.distribution} 1")
    assert below[unproved + 1] == "      unproved-fix"
    assert "      what to do: megacpp-overlays witness" in below[unproved:]


def test_an_overlay_whose_parts_differ_is_shown_under_the_most_important_decision(upstream: Upstream) -> None:
    records = [made_up(upstream.overlay(), decision) for decision in (Decision.ACTIVE, Decision.CONFLICT)]
    parts = tuple(replace(each, overlay=upstream.overlay()) for each in records)

    lines = str(Audit(version="9", mode="auto", settings=Settings(), records=parts)).splitlines()

    assert lines[1] == "0 active, 0 retired, 1 conflict"
    assert "active" not in lines
    assert "      it is active in another module" in lines


@given(
    texts=st.lists(st.text(alphabet="ab .-_/\x1b\n", min_size=1, max_size=400), min_size=4, max_size=4),
    decision=st.sampled_from(list(Decision)),
    has_seams=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_form_fits_80_columns_and_holds_nothing_that_moves_a_cursor(
    upstream: Upstream, texts: list[str], decision: Decision, has_seams: bool
) -> None:
    reason, title, breaks, retire_when = texts
    overlay = upstream.overlay(title=title, breaks=breaks, retire_when=retire_when)
    seams = (f"{upstream.module_name}.{'x' * 90}",) if has_seams else ()
    record = replace(made_up(overlay, decision), reason=reason, seams=seams)
    given_ = ("9", "auto", "0" * 16, [record])

    forms = [overview.short(*given_), overview.full(*given_), explanation.explained([record])]

    for line in itertools.chain(*forms):
        assert len(line.text) < 80
        assert line.text.isprintable()
        assert line.text == line.text.rstrip()


def test_all_that_is_known_is_in_the_long_form(mixed: Audit, upstream: Upstream) -> None:
    seams = (f"{upstream.module_name}.double",)
    records = [replace(each, seams=seams if each.decision is Decision.ACTIVE else ()) for each in mixed.records]

    lines = [line.text for line in overview.full("9", "auto", "0" * 16, records)]

    said = " ".join(" ".join(lines).split())
    for text in (
        f"replaced in {upstream.module_name}: double",
        "BROKEN, shape off-by-one",
        "without it: every double is one too large",
        "off: MEGACPP_OVERLAY_ACTIVE_FIX=off",
        "delete when: upstream doubles without adding one",
    ):
        assert text in said
    assert lines.index("conflict") < lines.index("active") < lines.index("armed")


def test_one_overlay_is_explained_with_all_that_a_reader_asks_next(upstream: Upstream) -> None:
    threads = (Thread("made/up", 7, "open"),)
    overlay = upstream.overlay(threads=threads, needs=())
    record = replace(made_up(overlay, Decision.ACTIVE, seams=(f"{upstream.module_name}.double",)), overlay=overlay)

    said = "\n".join(line.text for line in explanation.explained([record]))

    for text in (
        "double-fix (pack 99), overlay for ",
        "does       Doubles without adding one.",
        "defect     every double is one too large",
        "BROKEN, shape",
        "seen       x\n             a.py:3",
        "replaced   double",
        "switch     MEGACPP_OVERLAY_DOUBLE_FIX=off",
        "deleted    when upstream doubles without adding one",
        "threads    https://github.com/made/up/issues/7\n           (open)",
        "reproduce  megacpp-overlays repro 99",
    ):
        assert text in said


def test_the_shipped_schema_describes_the_plain_data() -> None:
    schema = json.loads(Path(rendering.__file__).with_name("audit.schema.json").read_text())
    decision = schema["$defs"]["decision"]

    assert schema["required"] == list(rendering.AuditData.__annotations__)
    every = list(get_type_hints(rendering.LeftAuditData))
    assert {*schema["properties"]} == {*every} == {*schema["required"], "model", "hub_copies", "ranks"}
    assert list(schema["properties"]["model"]["properties"]) == list(rendering.ModelData.__annotations__)
    assert list(schema["properties"]["ranks"]["properties"]) == list(rendering.AgreementData.__annotations__)
    assert list(decision["properties"]) == decision["required"] == list(rendering.DecisionData.__annotations__)
    assert decision["properties"]["decision"]["enum"] == [each.value for each in Decision]
    assert decision["properties"]["verdict"]["enum"] == [*(each.value for each in Verdict), "-"]
    assert decision["properties"]["proof"]["enum"] == [*(each.value for each in Proof), None]


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
        "proved_by",
        "repair",
        "looks_repaired",
        "evidence",
        "source_sha256",
        "seams",
        "rebound",
        "calls",
        "retire_when",
        "variable",
        "concerns",
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
def test_the_fingerprint_changes_with_decision_version_source_and_verdict(
    audit: Audit, change: dict[str, object]
) -> None:
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
