"""A gate: a declaration without seams, read when the session is armed, that prints advice and changes nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_up import BROKEN_TEXT, Upstream, gate_of

from megacpp_overlays.errors import ActivationError, RegistryError
from megacpp_overlays.loader import probing, registry, statement
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import Mode, Settings
from megacpp_overlays.model import Decision, Finding, Target, Verdict
from megacpp_overlays.source.trees import InstalledTree, SourceTree, shipped
from megacpp_overlays.upkeep.ledger import render

SessionMaker = Callable[..., Session]


def note(upstream: Upstream, text: str) -> None:
    (upstream.folder / upstream.name / "notes.txt").write_text(text)


def test_it_is_decided_when_the_session_is_armed_and_nothing_is_imported_for_it(
    upstream: Upstream, session: SessionMaker
) -> None:
    note(upstream, "does not work")

    armed = session(gate_of(upstream))
    armed.arm()

    (record,) = armed.audit().records
    assert record.decision is Decision.GATED
    assert upstream.name not in sys.modules
    assert record.seams == ()


def test_its_line_has_the_effect_the_advice_and_the_switch(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    note(upstream, "does not work")

    session(gate_of(upstream)).arm()

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[megacpp_overlays] WARNING gated: double-trouble (pack 98) on ")
    assert (
        ": the first double hangs. What to do: install fewer doubles. Seen: does not work (notes.txt:1) "
        "| delete when doubles and halves work together | off: MEGACPP_OVERLAY_DOUBLE_TROUBLE=off"
    ) in line


@pytest.mark.parametrize(
    ("notes", "decision"),
    [
        ("works", Decision.RETIRED),
        ("does not work", Decision.GATED),
        ("does nothing", Decision.CONFLICT),
        ("scribbles", Decision.CONFLICT),
        (None, Decision.ABSENT),
    ],
)
@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.OBSERVE])
def test_the_verdict_decides_and_observing_changes_nothing_about_that(
    upstream: Upstream, session: SessionMaker, notes: str | None, decision: Decision, mode: Mode
) -> None:
    if notes is not None:
        note(upstream, notes)

    armed = session(gate_of(upstream), mode=mode)
    armed.arm()

    assert [record.decision for record in armed.audit().records] == [decision]


def test_a_probe_that_raises_is_a_conflict_and_the_import_goes_on(upstream: Upstream, session: SessionMaker) -> None:
    def trip(_: SourceTree) -> Finding:
        raise RecursionError("too deep")

    armed = session(gate_of(upstream, probe=trip))
    armed.arm()

    (record,) = armed.audit().records
    assert record.decision is Decision.CONFLICT
    assert record.reason == "its code is nested too deeply for the probe to read it"


def test_strict_accepts_a_known_shape_and_refuses_an_unknown_one(upstream: Upstream, session: SessionMaker) -> None:
    """Only the owner of a run knows whether it uses the broken feature, so a gate with a known shape is advice."""
    note(upstream, "does not work")
    session(gate_of(upstream), mode=Mode.STRICT).arm()

    note(upstream, "scribbles")
    armed = session(gate_of(upstream), mode=Mode.STRICT)
    armed.arm()  # a run that needs none of it must start
    with pytest.raises(ActivationError, match="double-trouble could not be decided"):
        armed.audit().raise_if_strict()


def test_a_package_that_comes_onto_the_path_later_is_seen_by_the_audit(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    armed = session(gate_of(upstream))
    armed.arm()
    note(upstream, "does not work")

    assert [record.decision for record in armed.audit().records] == [Decision.GATED]
    assert capsys.readouterr().err.count("gated: double-trouble") == 1


def test_it_is_asked_again_when_a_target_is_imported(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    armed = session(gate_of(upstream), upstream.overlay())
    armed.arm()
    note(upstream, "does not work")

    upstream.load()

    assert capsys.readouterr().err.count("gated: double-trouble") == 1


def test_a_missing_target_is_looked_for_again_after_a_change_of_the_path_and_by_an_audit(
    upstream: Upstream, session: SessionMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SourceTree] = []

    def probe(tree: SourceTree) -> Finding:
        asked.append(tree)
        return gate_of(upstream).probe(tree)

    elsewhere = Target(distribution="nowhere", module="nowhere.at.all", symbol="double")
    modules = ("first", "second", "third")
    for name in modules:
        upstream.write(BROKEN_TEXT, module=name)
    overlays = [
        upstream.overlay(id=name, target=Target(upstream.name, f"{upstream.name}.{name}", "double"), unsupported={})
        for name in modules
    ]
    armed = session(gate_of(upstream, target=elsewhere, probe=probe), *overlays)
    armed.arm()
    assert len(asked) == 1

    upstream.load("first")
    upstream.load("second")
    assert len(asked) == 1

    monkeypatch.syspath_prepend(tmp_path / "more")
    upstream.load("third")
    assert len(asked) == 2

    armed.audit()
    assert len(asked) == 3


def test_ranks_and_children_are_not_compared_by_it(upstream: Upstream, session: SessionMaker) -> None:
    """The advice may depend on the GPUs of a host, and a gate changes nothing."""
    found = []
    for text in ("does not work", "works"):
        note(upstream, text)
        armed = session(gate_of(upstream))
        armed.arm()
        audit = armed.audit()
        found.append((audit.fingerprint, statement.digest(statement.of(audit, InstalledTree()))))

    assert found[0] == found[1]


def test_a_gate_that_is_switched_off_is_not_read(upstream: Upstream, session: SessionMaker) -> None:
    def trip(_: SourceTree) -> Finding:
        raise AssertionError("it was read")

    armed = session(gate_of(upstream, probe=trip), disabled=frozenset({"double-trouble"}))
    armed.arm()

    assert [record.reason for record in armed.audit().records] == ["MEGACPP_OVERLAY_DOUBLE_TROUBLE=off"]


@pytest.mark.parametrize("settings", [{"mode": Mode.OFF}, {"disabled": frozenset({"double-trouble"})}])
def test_it_can_be_switched_off(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str], settings: dict[str, Any]
) -> None:
    note(upstream, "does not work")

    armed = session(gate_of(upstream), **settings)
    armed.arm()

    assert [record.decision for record in armed.audit().records] == [Decision.DISABLED]
    assert "What to do" not in capsys.readouterr().err


def test_one_rank_says_it_for_all(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    note(upstream, "does not work")
    session(gate_of(upstream), rank=3).arm()
    assert capsys.readouterr().err == ""

    note(upstream, "scribbles")
    session(gate_of(upstream), rank=3).arm()
    assert "[megacpp_overlays rank 3] WARNING conflict: double-trouble" in capsys.readouterr().err


def test_a_child_does_not_repeat_the_lines_of_its_parent(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    note(upstream, "does not work")
    armed = session(gate_of(upstream), parent_is_armed=True)
    armed.arm()

    assert capsys.readouterr().err == ""
    assert [record.decision for record in armed.audit().records] == [Decision.GATED]


def test_an_overlay_with_the_same_target_is_settled_on_its_own(upstream: Upstream, session: SessionMaker) -> None:
    upstream.write(BROKEN_TEXT)
    note(upstream, "does not work")
    armed = session(gate_of(upstream), upstream.overlay())
    armed.arm()
    assert [record.decision for record in armed.audit().records] == [Decision.GATED, Decision.ARMED]

    upstream.load()

    assert [record.decision for record in armed.audit().records] == [Decision.GATED, Decision.ACTIVE]


def test_arming_again_says_nothing_again_and_undoing_leaves_it(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    note(upstream, "does not work")
    armed = session(gate_of(upstream))
    armed.arm()
    capsys.readouterr()

    armed.undo()
    armed.arm()

    assert capsys.readouterr().err == ""
    assert [record.decision for record in armed.audit().records] == [Decision.GATED]


def test_the_audit_prints_it_as_text_and_as_data(upstream: Upstream, session: SessionMaker) -> None:
    note(upstream, "does not work")
    armed = session(gate_of(upstream))
    armed.arm()

    text, data = str(armed.audit()), json.loads(armed.audit().to_json())

    assert "install fewer doubles" in text
    assert "off: MEGACPP_OVERLAY_DOUBLE_TROUBLE=off" in text
    (decision,) = data["decisions"]
    assert (decision["decision"], decision["shape"]) == ("gated", "no-work")


def test_versions_of_the_whole_combination_are_named(upstream: Upstream) -> None:
    package = upstream.folder / f"{upstream.name}-1.5.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {upstream.name}\nVersion: 1.5\n")

    assert probing.versions(gate_of(upstream)) == f"1.5 with pytest {pytest.__version__}"
    assert probing.versions(gate_of(upstream, beside=("not-here-at-all",))) == "1.5"
    assert probing.versions(gate_of(upstream, target=Target("not-here-at-all", "nothing", "at_all"))) is None


def test_one_without_advice_is_refused(upstream: Upstream) -> None:
    with pytest.raises(RegistryError, match="here: a gate without advice for a shape is no gate"):
        registry.check([("here", gate_of(upstream, unsupported={}))])
    with pytest.raises(RegistryError, match="here: a gate without advice for a shape is no gate"):
        registry.check([("here", gate_of(upstream, unsupported={"no-work": " "}))])


def test_the_ledger_has_its_advice_and_its_end(upstream: Upstream) -> None:
    text = render([gate_of(upstream)], None)

    for words in (
        "## double-trouble (gate, pack 98)",
        "| What to do, shape `no-work` | install fewer doubles |",
        "| If nothing is done | the first double hangs |",
        "| Deleted when | doubles and halves work together |",
        "| Switched off by | `MEGACPP_OVERLAY_DOUBLE_TROUBLE=off` |",
    ):
        assert words in text


def test_a_gate_is_settled_without_a_session_as_well(upstream: Upstream) -> None:
    note(upstream, "does not work")

    record = probing.assess_gate(gate_of(upstream), Settings(), InstalledTree())

    assert record.decision is Decision.GATED


ELSEWHERE = "every GPU of this host has compute capability 8.0"


@pytest.mark.parametrize("notes", ["does not work", "does nothing", "in another way"])
def test_a_gate_is_silent_on_a_host_that_is_not_concerned_and_its_reason_has_the_evidence(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str], notes: str
) -> None:
    note(upstream, notes)
    gate = gate_of(upstream, elsewhere=lambda: ELSEWHERE)

    armed = session(gate)
    armed.arm()

    (record,) = armed.audit().records
    assert record.decision is Decision.ABSENT
    assert record.reason.startswith(f"{notes} (notes.txt:1)")
    assert record.reason.endswith(ELSEWHERE)
    assert "double-trouble" not in capsys.readouterr().err
    assert probing.examine(gate, InstalledTree()).verdict in {Verdict.BROKEN, Verdict.UNRECOGNISED}


def test_a_gate_without_a_defect_is_retired_on_any_host(upstream: Upstream) -> None:
    note(upstream, "works")

    record = probing.assess_gate(gate_of(upstream, elsewhere=lambda: ELSEWHERE), Settings(), InstalledTree())

    assert record.decision is Decision.RETIRED


def fails() -> str | None:
    raise OSError("the driver does not answer")


@pytest.mark.parametrize("elsewhere", [fails, lambda: None])
def test_a_host_that_is_concerned_or_cannot_be_checked_gets_the_warning(
    upstream: Upstream, elsewhere: Callable[[], str | None]
) -> None:
    note(upstream, "does not work")

    record = probing.assess_gate(gate_of(upstream, elsewhere=elsewhere), Settings(), InstalledTree())

    assert record.decision is Decision.GATED


def test_a_shipped_file_reads_the_same_from_every_kind_of_tree(upstream: Upstream, tmp_path: Path) -> None:
    import zipfile

    from megacpp_overlays.source.file_trees import ArchiveTree, DirectoryTree
    from megacpp_overlays.source.trees import CachedTree

    note(upstream, "works")
    wheel = tmp_path / "made_up-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(upstream.folder / upstream.name / "notes.txt", f"{upstream.name}/notes.txt")
    opened = ArchiveTree(wheel)
    trees = [InstalledTree(), DirectoryTree(upstream.folder), opened, CachedTree(opened)]

    assert [getattr(shipped(tree, upstream.name, "notes.txt"), "text", None) for tree in trees] == ["works"] * 4
    assert [shipped(tree, upstream.name, "gone.txt") for tree in trees] == [None] * 4
    assert [shipped(tree, "not_here", "notes.txt") for tree in trees] == [None] * 4
    opened.close()
