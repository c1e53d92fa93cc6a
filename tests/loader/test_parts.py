"""An overlay in parts: one defect, one switch and one ledger entry, in several modules."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from made_up import BROKEN_TEXT, FIXED_TEXT, Upstream

from megacpp_overlays.errors import RegistryError
from megacpp_overlays.loader import registry
from megacpp_overlays.loader.session import Session
from megacpp_overlays.model import Decision, Observation, Overlay, Target, Thread
from megacpp_overlays.source.file_trees import DirectoryTree
from megacpp_overlays.upkeep.ledger import due, render

SessionMaker = Callable[..., Session]


def parts(upstream: Upstream, **changes: Any) -> tuple[Overlay, Overlay]:
    """Return two parts of one overlay, about the modules `layers` and `moved`."""
    moved = Upstream(upstream.name, upstream.folder)
    first = upstream.overlay(**changes)
    # The probe of the made-up upstream reads `layers`; the other part asks the same of `moved`.
    probe = lambda tree: moved.probe(_MovedTree(tree, upstream.name))  # noqa: E731
    target = Target(distribution=upstream.name, module=f"{upstream.name}.moved", symbol="double")
    return first, replace(first, target=target, probe=probe)


class _MovedTree:
    """A tree in which `moved` answers to the name `layers`."""

    def __init__(self, tree: Any, package: str) -> None:
        self._tree, self._package = tree, package

    def module(self, name: str) -> Any:
        return self._tree.module(name.replace(f"{self._package}.layers", f"{self._package}.moved"))


def decisions(session: Session) -> list[tuple[str, str]]:
    return [(r.overlay.target.module.rpartition(".")[2], r.decision.value) for r in session.audit().decisions]


def test_each_part_is_decided_when_its_own_module_is_imported(upstream: Upstream, session: SessionMaker) -> None:
    upstream.write(BROKEN_TEXT, module="moved")
    made = session(*parts(upstream))
    made.arm()

    upstream.load("moved")
    assert decisions(made) == [("layers", "armed"), ("moved", "active")]

    upstream.load("layers")
    assert decisions(made) == [("layers", "active"), ("moved", "active")]
    assert upstream.load("layers").double(2) == upstream.load("moved").double(2) == 4


def test_active_parts_are_one_line_of_the_log(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream.write(BROKEN_TEXT, module="moved")
    session(*parts(upstream)).arm()
    upstream.load("moved")
    upstream.load("layers")

    assert capsys.readouterr().err.count("active: double-fix") == 1


def test_a_part_that_is_absent_is_left_out_where_another_is_there(upstream: Upstream, session: SessionMaker) -> None:
    made = session(*parts(upstream))
    made.arm()
    upstream.load("layers")

    assert decisions(made) == [("layers", "active")]
    assert [item["target"] for item in json.loads(made.audit().to_json())["decisions"]] == [
        f"{upstream.name}.layers.double"
    ]


def test_an_overlay_is_retired_when_no_part_has_work_left(upstream: Upstream, session: SessionMaker) -> None:
    upstream.write(FIXED_TEXT, module="moved")
    made = session(*parts(upstream))
    made.arm()
    upstream.load("moved")
    assert decisions(made) == [("layers", "armed")]

    upstream.load("layers")
    assert decisions(made) == [("layers", "active")]

    upstream.write(FIXED_TEXT)
    importlib.reload(upstream.load("layers"))
    assert decisions(made) == [("layers", "retired"), ("moved", "retired")]


def test_an_overlay_whose_parts_are_all_absent_is_absent_once(upstream: Upstream, session: SessionMaker) -> None:
    (upstream.folder / upstream.name / "layers.py").unlink()
    made = session(*parts(upstream))
    made.arm()

    assert decisions(made) == [("layers", "absent")]


def test_one_switch_is_for_all_parts_and_says_so_once(upstream: Upstream, session: SessionMaker) -> None:
    upstream.write(BROKEN_TEXT, module="moved")
    made = session(*parts(upstream), disabled=frozenset({"double-fix"}))
    made.arm()

    assert decisions(made) == [("layers", "disabled")]
    assert upstream.load("layers").double(2) == upstream.load("moved").double(2) == 5


def test_undo_puts_every_part_back(upstream: Upstream, session: SessionMaker) -> None:
    upstream.write(BROKEN_TEXT, module="moved")
    made = session(*parts(upstream))
    made.arm()
    layers, moved = upstream.load("layers"), upstream.load("moved")

    made.undo("double-fix")
    assert layers.double(2) == moved.double(2) == 5

    made.arm()
    assert layers.double(2) == moved.double(2) == 4


def test_a_conflict_in_one_part_leaves_the_other_active(upstream: Upstream, session: SessionMaker) -> None:
    upstream.write(BROKEN_TEXT.replace("x + x + 1", "x + x + 7"), module="moved")
    made = session(*parts(upstream))
    made.arm()
    upstream.load("layers")
    upstream.load("moved")

    audit = made.audit()
    assert decisions(made) == [("layers", "active"), ("moved", "conflict")]
    assert [record.overlay.target.module for record in audit.conflicts] == [f"{upstream.name}.moved"]


def test_parts_that_wait_are_one_line_that_names_them_all(upstream: Upstream, session: SessionMaker) -> None:
    upstream.write(BROKEN_TEXT, module="moved")
    made = session(*parts(upstream))
    made.arm()

    (record,) = made.audit().decisions
    assert record.decision is Decision.ARMED
    assert record.reason == f"waits for the import of {upstream.name}.layers or {upstream.name}.moved"


def test_parts_of_the_same_words_are_all_shown_where_something_was_done(
    upstream: Upstream, session: SessionMaker
) -> None:
    """The evidence of both parts is the same line of code; the replaced symbols differ."""
    upstream.write(BROKEN_TEXT, module="moved")
    failing = Observation(broken=True, seen="no")
    for changes, decision in (({}, Decision.ACTIVE), ({"self_test": lambda module: failing}, Decision.CONFLICT)):
        made = session(*parts(upstream, **changes))
        made.arm()
        upstream.load("layers")
        upstream.load("moved")
        audit = made.audit()

        assert [record.decision for record in audit.decisions] == [decision, decision]
        assert len(audit.conflicts) == (2 if decision is Decision.CONFLICT else 0)
        made.undo()


def test_the_fingerprint_sees_the_code_of_a_part_that_is_not_shown(upstream: Upstream, session: SessionMaker) -> None:
    fingerprints = set()
    for comment in ("", "# another copy"):
        upstream.write(BROKEN_TEXT)
        upstream.write(f"{FIXED_TEXT}\n{comment}\n", module="moved")
        made = session(*parts(upstream))
        made.arm()
        for module in ("layers", "moved"):
            importlib.reload(upstream.load(module))
        assert decisions(made) == [("layers", "active")]
        fingerprints.add(made.audit().fingerprint)
        made.undo()

    assert len(fingerprints) == 2


def test_the_fingerprint_tells_which_part_was_decided(upstream: Upstream, session: SessionMaker) -> None:
    upstream.write(BROKEN_TEXT, module="moved")
    made = session(*parts(upstream))
    made.arm()
    upstream.load("layers")
    upstream.load("moved")
    both = made.audit()
    first, second = both.records

    assert both.decisions == both.records
    assert first.source_sha256 == second.source_sha256
    assert replace(both, records=(first,)).fingerprint != replace(both, records=(second,)).fingerprint


def test_the_ledger_has_one_entry_with_every_target(upstream: Upstream) -> None:
    text = render(parts(upstream), None)

    assert text.count("## double-fix (pack 99)") == 1
    assert f"| Target | `{upstream.name}.layers.double` of {upstream.name} |" in text
    assert f"| Target | `{upstream.name}.moved.double` of {upstream.name} |" in text
    assert text.count("| Switched off by |") == text.count("| Last validated |") == 1


@pytest.mark.parametrize(
    ("layers", "moved", "is_due"),
    [
        (BROKEN_TEXT, BROKEN_TEXT, False),
        (FIXED_TEXT, BROKEN_TEXT, False),
        (FIXED_TEXT, FIXED_TEXT, True),
        (FIXED_TEXT, "", True),
        ("", FIXED_TEXT, True),
        ("", "", False),
    ],
)
def test_an_overlay_is_due_when_no_part_has_work_left(
    upstream: Upstream, layers: str, moved: str, is_due: bool
) -> None:
    upstream.write(layers)
    upstream.write(moved, module="moved")

    found = due(parts(upstream), DirectoryTree(upstream.folder))

    assert [overlay.id for overlay in found] == (["double-fix"] if is_due else [])


def test_parts_are_declared_together(upstream: Upstream) -> None:
    first, second = parts(upstream)

    assert registry.check([("here", first), ("here", second)]) == (first, second)
    with pytest.raises(RegistryError, match="there and here both declare double-fix"):
        registry.check([("here", first), ("there", second)])


def test_two_parts_cannot_be_about_the_same_module(upstream: Upstream) -> None:
    first, _ = parts(upstream)
    again = replace(first, replacements=parts(upstream)[1].replacements)

    with pytest.raises(RegistryError, match=r"here: two parts of double-fix are about .*\.layers"):
        registry.check([("here", first), ("here", again)])


@pytest.mark.parametrize(
    "change",
    [
        {"pack": 98},
        {"title": "other"},
        {"breaks": "other"},
        {"retire_when": "other"},
        {"threads": (Thread(repository="a/b", number=1, state="open"),)},
    ],
)
def test_parts_agree_on_the_fields_of_the_overlay(upstream: Upstream, change: dict[str, Any]) -> None:
    first, second = parts(upstream)

    with pytest.raises(RegistryError, match=f"here: the parts of double-fix do not agree on {next(iter(change))}"):
        registry.check([("here", first), ("here", replace(second, **change))])


def test_a_plugin_may_declare_parts(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_load_plugin", lambda name: parts(upstream))

    assert [overlay.id for overlay in registry.load(["ours"])].count("double-fix") == 2


# --- parts that need another one ---


def needing(upstream: Upstream, **changes: Any) -> tuple[Overlay, Overlay]:
    """Return two parts, of which `moved` needs `layers`."""
    first, second = parts(upstream)
    return replace(first, **changes), replace(second, needs_parts=(first.target.module,))


def decided(session: Session) -> list[str]:
    return [record.decision.value for record in session.audit().records]


ORDERS = pytest.mark.parametrize("order", [("layers", "moved"), ("moved", "layers")], ids=" then ".join)
"""Which target is imported first."""


@ORDERS
def test_a_part_and_the_one_that_it_needs_are_in_together(
    upstream: Upstream, session: SessionMaker, order: tuple[str, str]
) -> None:
    upstream.write(BROKEN_TEXT, module="moved")
    current = session(*needing(upstream))
    current.arm()
    modules = [upstream.load(name) for name in order]

    assert decided(current) == ["active", "active"]
    assert [module.double(1) for module in modules] == [2, 2]


@ORDERS
def test_without_the_part_that_it_needs_a_part_is_not_in(
    upstream: Upstream, session: SessionMaker, order: tuple[str, str]
) -> None:
    upstream.write(BROKEN_TEXT, module="moved")
    never = {"self_test": lambda _: Observation(broken=True, seen="it never works")}
    current = session(*needing(upstream, **never))
    current.arm()
    modules = [upstream.load(name) for name in order]

    _, moved = current.audit().records
    assert decided(current) == ["conflict", "conflict"]
    assert moved.reason.startswith(f"it needs its part on {upstream.module_name}, which is conflict here: ")
    assert [module.double(1) for module in modules] == [3, 3]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (("no.such.module",), "needs its part on no.such.module, which it does not have"),
        ("moved", "is no tuple of modules"),
    ],
    ids=["another", "text"],
)
def test_a_part_can_only_need_a_part(upstream: Upstream, wanted: Any, said: str) -> None:
    first, second = parts(upstream)

    with pytest.raises(RegistryError, match=said):
        registry.check([("made_up", first), ("made_up", replace(second, needs_parts=wanted))])


def test_parts_cannot_need_one_another(upstream: Upstream) -> None:
    first, second = parts(upstream)
    one, other = (
        replace(first, needs_parts=(second.target.module,)),
        replace(second, needs_parts=(first.target.module,)),
    )

    with pytest.raises(RegistryError, match="needs itself"):
        registry.check([("made_up", one), ("made_up", other)])
