"""All seams of an overlay are in and verified, or upstream is exactly as it was and the record says why."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from made_up import BROKEN_TEXT, FIXED_TEXT, Upstream

from megacpp_overlays.errors import ActivationError, OverlayError
from megacpp_overlays.loader import changes
from megacpp_overlays.loader.install import Circumstances, RefusedError, install
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import Mode
from megacpp_overlays.model import Decision, Observation, Overlay, Record, Replacement
from megacpp_overlays.source.trees import InstalledTree

SessionMaker = Callable[..., Session]


def settle(session: SessionMaker, upstream: Upstream, overlay: Overlay, **settings: Any) -> tuple[Record, ModuleType]:
    current = session(overlay, **settings)
    current.arm()
    module = upstream.load()
    return current.audit().records[0], module


def explode(*_: object, **__: object) -> Any:
    raise ImportError("no such kernel")


def test_a_broken_target_is_repaired_and_the_record_names_the_repair_and_its_place(
    upstream: Upstream, session: SessionMaker
) -> None:
    record, module = settle(session, upstream, upstream.overlay())

    assert record.decision is Decision.ACTIVE
    assert record.shape == "off-by-one"
    assert record.seams == (f"{upstream.module_name}.double",)
    assert "return x + x + 1 (layers.py:7)" in record.reason
    assert record.source_sha256 is not None
    assert module.double(1) == 2


@pytest.mark.parametrize(
    ("text", "decision"),
    [
        (FIXED_TEXT, Decision.RETIRED),
        (BROKEN_TEXT.replace("double", "triple"), Decision.ABSENT),
        (BROKEN_TEXT.replace("x + x + 1", "2 * x + 1"), Decision.CONFLICT),
    ],
    ids=["fixed", "absent", "unrecognised"],
)
def test_anything_but_a_broken_target_is_left_alone(
    upstream: Upstream, session: SessionMaker, text: str, decision: Decision
) -> None:
    upstream.write(text)

    record, module = settle(session, upstream, upstream.overlay())

    assert record.decision is decision
    assert record.seams == ()
    assert not any(hasattr(value, "__megacpp_seam__") for value in vars(module).values())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"probe": explode}, "the probe could not read it: ImportError: no such kernel"),
        ({"witness": explode}, "ImportError: no such kernel"),
        ({"self_test": explode}, "ImportError: no such kernel"),
        ({"replacements": {"off-by-one": (Replacement(symbol="double", make=explode),)}}, "no such kernel"),
        ({"witness": lambda _: Observation(broken=False, seen="double(1) = 2")}, "the loaded code does not behave so"),
        ({"self_test": lambda _: Observation(broken=True, seen="double(1) = 7")}, "self-test failed.*= 7"),
        ({"replacements": {"another": (Replacement(symbol="double", make=explode),)}}, "no seam for shape off-by-one"),
        (
            {
                "replacements": {"another": (Replacement(symbol="double", make=explode),)},
                "unsupported": {"off-by-one": "rounding is upstream's choice"},
            },
            "rounding is upstream's choice",
        ),
        ({"replacements": {"off-by-one": (Replacement(symbol="gone", make=explode),)}}, "has no attribute gone"),
    ],
    ids=[
        "probe fails",
        "witness fails",
        "self-test fails",
        "make fails",
        "witness disagrees",
        "self-test says no",
        "shape without seams",
        "unsupported shape",
        "missing symbol",
    ],
)
def test_a_failure_leaves_upstream_unchanged_and_gives_the_reason(
    upstream: Upstream, session: SessionMaker, changes: dict[str, Any], says: str
) -> None:
    record, module = settle(session, upstream, upstream.overlay(**changes))

    assert record.decision is Decision.CONFLICT
    assert re.search(says, record.reason), record.reason
    assert module.double(1) == 3
    assert not hasattr(module.double, "__megacpp_seam__")


def test_if_the_second_of_two_seams_fails_the_first_is_undone(upstream: Upstream, session: SessionMaker) -> None:
    minus_one = Replacement(symbol="double", make=lambda original, _: lambda x: original(x) - 1)
    overlay = upstream.overlay(
        replacements={"off-by-one": (minus_one, Replacement(symbol="Layer.forward", make=explode))}
    )

    record, module = settle(session, upstream, overlay)

    assert record.decision is Decision.CONFLICT
    assert module.double(1) == 3


def test_a_target_that_another_library_replaced_is_not_touched(upstream: Upstream, session: SessionMaker) -> None:
    module = upstream.load()

    def theirs(x: int) -> int:
        return 2 * x

    module.double = theirs

    record, _ = settle(session, upstream, upstream.overlay())

    assert record.decision is Decision.CONFLICT
    assert "double was replaced by" in record.reason
    assert "theirs" in record.reason
    assert module.double is theirs


def test_observe_reports_its_decisions_and_installs_nothing(upstream: Upstream, session: SessionMaker) -> None:
    record, module = settle(session, upstream, upstream.overlay(), mode=Mode.OBSERVE)

    assert record.decision is Decision.DISABLED
    assert "observe only; would install for shape off-by-one" in record.reason
    assert module.double(1) == 3


def test_one_overlay_that_is_off_is_still_probed_and_not_installed(upstream: Upstream, session: SessionMaker) -> None:
    record, module = settle(session, upstream, upstream.overlay(), disabled=frozenset({"double-fix"}))

    assert record.decision is Decision.DISABLED
    assert record.reason.startswith("MEGACPP_OVERLAY_DOUBLE_FIX=off; upstream here is BROKEN")
    assert module.double(1) == 3


def test_everything_off_arms_nothing(upstream: Upstream, session: SessionMaker) -> None:
    record, module = settle(session, upstream, upstream.overlay(), mode=Mode.OFF)

    assert (record.decision, record.reason, record.finding) == (Decision.DISABLED, "MEGACPP_OVERLAYS=off", None)
    assert module.double(1) == 3


def test_strict_raises_our_own_error_at_import_and_at_audit_again(upstream: Upstream, session: SessionMaker) -> None:
    upstream.write(BROKEN_TEXT.replace("x + x + 1", "2 * x + 1"))
    current = session(upstream.overlay(), mode=Mode.STRICT)
    current.arm()

    for step in (upstream.load, upstream.load, lambda: current.audit().raise_if_strict()):
        with pytest.raises(ActivationError) as caught:
            step()
        assert not isinstance(caught.value, ImportError)
        for word in ("double-fix", f"{upstream.module_name}.double", "2 * x + 1", "MEGACPP_OVERLAY_DOUBLE_FIX=off"):
            assert word in str(caught.value)


def test_strict_is_silent_where_nothing_conflicts(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay(), mode=Mode.STRICT)
    current.arm()

    assert upstream.load().double(1) == 2
    assert current.audit().conflicts == ()


def test_an_error_of_the_loader_itself_does_not_reach_the_import(
    upstream: Upstream, session: SessionMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megacpp_overlays.loader.probing.assess_overlay", explode)

    record, module = settle(session, upstream, upstream.overlay())

    assert module.double(1) == 3
    assert record.decision is Decision.CONFLICT
    assert record.reason == "ImportError: no such kernel"


def test_a_seam_that_is_taken_over_later_is_a_conflict_in_the_audit_and_survives_undo(
    upstream: Upstream, session: SessionMaker
) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()

    def theirs(x: int) -> int:
        return x

    module.double = theirs

    record = current.audit().records[0]
    assert record.decision is Decision.CONFLICT
    assert "was replaced after us by" in record.reason
    assert "if the code in place does not repair it" in str(current.audit())
    with pytest.raises(OverlayError, match=r"replaced after us by .*theirs"):
        current.undo()
    assert module.double is theirs


def test_undoing_an_overlay_that_does_not_exist_names_the_known_ones(upstream: Upstream, session: SessionMaker) -> None:
    with pytest.raises(OverlayError, match="no overlay scale-pad; known: double-fix"):
        session(upstream.overlay()).undo("scale-pad")


def test_an_interrupt_while_installing_leaves_upstream_as_it_was(upstream: Upstream, session: SessionMaker) -> None:
    def interrupt(_: ModuleType) -> Observation:
        raise KeyboardInterrupt

    current = session(upstream.overlay(self_test=interrupt))
    module = upstream.load()

    with pytest.raises(KeyboardInterrupt):
        current.arm()

    assert module.double(1) == 3


def test_an_error_while_arming_again_does_not_reach_the_launcher(
    upstream: Upstream, session: SessionMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()
    current.undo()
    monkeypatch.setattr("megacpp_overlays.loader.probing.assess_overlay", explode)

    current.arm()

    assert current.audit().records[0].reason == "ImportError: no such kernel"
    assert module.double(1) == 3


def test_a_target_whose_source_cannot_be_read_is_a_conflict(upstream: Upstream, session: SessionMaker) -> None:
    module = upstream.load()
    module.__file__ = str(upstream.folder / "layers.so")

    record, _ = settle(session, upstream, upstream.overlay())

    assert record.decision is Decision.CONFLICT
    assert "has no Python source" in record.reason
    assert record.source_sha256 is None
    assert module.double(1) == 3


def test_a_target_that_vanished_while_it_was_decided_on_is_a_conflict(
    upstream: Upstream, session: SessionMaker
) -> None:
    found = upstream.probe(InstalledTree())
    target = upstream.overlay().target._replace(module=upstream.module_name)

    class EmptyTree:
        def module(self, name: str) -> None:
            return None

    with pytest.raises(OverlayError, match="is loaded but has no source"):
        install(
            upstream.overlay(target=target), found.shape or "", upstream.load(), EmptyTree(), Circumstances(late=False)
        )


def test_an_error_outside_every_overlay_is_recorded_too(
    upstream: Upstream, session: SessionMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = session(upstream.overlay())
    current.arm()
    monkeypatch.setattr(changes, "apply", explode)

    assert upstream.load().double(1) == 3
    record = current.audit().records[0]
    assert (record.decision, record.reason) == (Decision.CONFLICT, "ImportError: no such kernel")


@pytest.mark.parametrize(
    ("replacement", "refused"),
    [
        (lambda x: x + x, ""),
        (lambda *args, **kwargs: 2 * args[0], ""),
        (lambda value: value + value, "signature: upstream's .*double takes x, and the seam does not"),
    ],
    ids=["by name", "anything", "another name"],
)
def test_on_unrecognised_code_a_seam_takes_every_parameter_of_upstream(
    upstream: Upstream, replacement: Any, refused: str
) -> None:
    upstream.write(BROKEN_TEXT)
    module = upstream.load()
    overlay = upstream.overlay(
        replacements={"off-by-one": (Replacement(symbol="double", make=lambda *_: replacement),)}
    )
    circumstances = Circumstances(late=False, signature=True)

    with pytest.raises(RefusedError, match=refused) if refused else contextlib.nullcontext():
        install(overlay, "off-by-one", module, InstalledTree(), circumstances)

    assert module.double(1) == (3 if refused else 2)
