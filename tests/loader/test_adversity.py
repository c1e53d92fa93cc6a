"""Interference of other code in a training process with a session, and the session's reports of it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import wrapt
from made_up import BROKEN_TEXT, FIXED_TEXT, Upstream
from places import HANG_S

from megacpp_overlays.errors import ActivationError
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import LogForm, Mode
from megacpp_overlays.model import Decision, Observation, Record
from megacpp_overlays.source.trees import InstalledTree

SessionMaker = Callable[..., Session]
UNKNOWN_TEXT = BROKEN_TEXT.replace("x + x + 1", "2 * x + 1")


def only(session: Session) -> Record:
    (record,) = session.audit().records
    return record


# Where the package is.


def test_an_editable_install_that_only_its_own_finder_knows_is_found(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            if name == "editable_namespace":
                spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
                spec.submodule_search_locations = ["__editable__.finder.__path_hook__"]
                return spec
            if name == "editable_namespace.core":
                folder = upstream.folder / upstream.name
                return importlib.util.spec_from_file_location(
                    name, folder / "__init__.py", submodule_search_locations=[str(folder)]
                )
            return None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])

    found = InstalledTree().module("editable_namespace.core.layers")

    assert found is not None
    assert found.function("double") is not None
    assert "editable_namespace" not in sys.modules


# Loaded past the hook.


def test_a_target_that_a_recipe_loaded_past_every_hook_is_settled_by_the_audit(
    upstream: Upstream, session: SessionMaker
) -> None:
    current = session(upstream.overlay())
    current.arm()
    spec = importlib.util.spec_from_file_location(upstream.module_name, upstream.folder / upstream.name / "layers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[upstream.module_name] = module
    spec.loader.exec_module(module)
    assert module.double(1) == 3

    assert only(current).decision is Decision.ACTIVE
    assert module.double(1) == 2


def test_a_second_try_after_another_hook_made_the_first_import_fail_is_settled_by_the_audit(
    upstream: Upstream, session: SessionMaker
) -> None:
    def fail_once(_: ModuleType) -> None:
        raise RuntimeError("their hook")

    wrapt.register_post_import_hook(fail_once, upstream.module_name)
    current = session(upstream.overlay())
    current.arm()
    with pytest.raises(RuntimeError, match="their hook"):
        upstream.load()

    module = upstream.load()

    assert only(current).decision is Decision.ACTIVE
    assert module.double(1) == 2


def test_a_module_that_puts_something_else_in_its_place_is_a_conflict(
    upstream: Upstream, session: SessionMaker
) -> None:
    upstream.write(
        "import sys, types\ndef swap(name):\n    sys.modules[name] = types.SimpleNamespace(double=lambda x: 3)", "lazy"
    )
    upstream.write(BROKEN_TEXT + "from . import lazy\nlazy.swap(__name__)\n")
    current = session(upstream.overlay())
    current.arm()

    assert upstream.load().double(1) == 3
    assert "put something else in its place" in only(current).reason


def test_something_in_place_of_the_target_module_does_not_stop_the_launcher(
    upstream: Upstream, session: SessionMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, upstream.module_name, SimpleNamespace())  # type: ignore[misc]
    current = session(upstream.overlay())

    current.arm()

    assert only(current).decision is Decision.CONFLICT


# Two sessions in one process.


def test_a_reload_with_two_sessions_armed_reaches_both(upstream: Upstream, session: SessionMaker) -> None:
    first, second = session(upstream.overlay()), session(upstream.overlay())
    first.arm()
    second.arm()
    module = upstream.load()

    importlib.reload(module)

    assert module.double(1) == 2
    assert (only(first).decision, only(second).decision) == (Decision.ACTIVE, Decision.ACTIVE)


def test_two_sessions_that_are_armed_while_half_imported_both_hear(upstream: Upstream, session: SessionMaker) -> None:
    first, second = session(upstream.overlay()), session(upstream.overlay())
    sys.arm_both = lambda: (first.arm(), second.arm())  # type: ignore[attr-defined]
    try:
        upstream.write("import sys\nsys.arm_both()\n" + BROKEN_TEXT)
        module = upstream.load()
    finally:
        del sys.arm_both  # type: ignore[attr-defined]

    assert module.double(1) == 2
    assert [next(iter(each.parts.values())).record.decision for each in (first, second)] == [
        Decision.ACTIVE,
        Decision.ACTIVE,
    ]


def test_a_session_that_fails_on_an_adopted_seam_leaves_it_to_its_owner(
    upstream: Upstream, session: SessionMaker
) -> None:
    first = session(upstream.overlay())
    first.arm()
    module = upstream.load()
    second = session(upstream.overlay(self_test=lambda _: Observation(broken=True, seen="no")))

    second.arm()

    assert only(second).decision is Decision.CONFLICT
    assert only(first).decision is Decision.ACTIVE
    assert module.double(1) == 2


# Holders, and undo.


def test_an_original_that_upstream_itself_keeps_elsewhere_is_a_conflict_in_either_order(
    upstream: Upstream, session: SessionMaker
) -> None:
    upstream.write(BROKEN_TEXT + "REGISTRY = [double]\n")
    first = session(upstream.overlay())
    first.arm()
    module = upstream.load()

    assert only(first).decision is Decision.CONFLICT
    assert "a list of 1 items" in only(first).reason
    assert (module.double(1), module.REGISTRY[0](1)) == (3, 3)


def test_undone_and_armed_again_although_a_caller_holds_the_old_seam(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()
    held = module.double
    current.undo()

    current.arm()

    assert only(current).decision is Decision.ACTIVE
    assert module.double is held


def test_an_undo_in_another_thread_waits_for_the_decision_that_is_being_taken(
    upstream: Upstream, session: SessionMaker
) -> None:
    testing, go_on = threading.Event(), threading.Event()

    def slow(module: ModuleType) -> Observation:
        testing.set()
        go_on.wait(HANG_S)
        return Observation(broken=module.double(1) != 2, seen="slow")

    current = session(upstream.overlay(self_test=slow))
    current.arm()
    importer = threading.Thread(target=upstream.load)
    importer.start()
    assert testing.wait(HANG_S)
    undoer = threading.Thread(target=current.undo)
    undoer.start()
    go_on.set()
    importer.join(HANG_S)
    undoer.join(HANG_S)

    assert upstream.load().double(1) == 3
    assert only(current).reason == "undone in this process"


def test_a_wrapper_around_our_seam_is_reported_and_no_conflict(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()
    module.double = functools.wraps(module.double)(lambda x, inner=module.double: inner(x))

    record = only(current)

    assert record.decision is Decision.ACTIVE
    assert "is wrapped by" in record.reason


def test_a_module_that_refuses_assignment_undoes_earlier_rebindings(
    upstream: Upstream, session: SessionMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stubborn(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            raise RuntimeError("read only")

    module = upstream.load()
    upstream.write("from .layers import double as twice\n", module="user")
    user = upstream.load("user")
    stubborn = Stubborn("zz_stubborn")
    vars(stubborn)["double"] = module.double
    monkeypatch.setitem(sys.modules, "zz_stubborn", stubborn)
    current = session(upstream.overlay())

    current.arm()

    assert "zz_stubborn.double holds the other function and cannot be assigned" in only(current).reason
    assert (module.double(1), user.twice(1)) == (3, 3)


def test_the_search_for_names_does_not_execute_lazy_modules(
    upstream: Upstream, session: SessionMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream.write("raise ImportError('woken')\n", module="lazy")
    spec = importlib.util.find_spec(f"{upstream.name}.lazy")
    assert spec is not None
    assert spec.loader is not None
    loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    loader.exec_module(lazy)
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    current = session(upstream.overlay())
    current.arm()

    assert upstream.load().double(1) == 2


# Errors that must not get out.


def test_a_logging_handler_that_raises_does_not_stop_the_import(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    class Raising(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise RuntimeError("no disk")

    logger, handler = logging.getLogger("megacpp_overlays"), Raising()
    logger.addHandler(handler)
    try:
        upstream.write(UNKNOWN_TEXT)
        session(upstream.overlay(), log=LogForm.LOGGING).arm()
        upstream.load()
    finally:
        logger.removeHandler(handler)

    assert "does not work: RuntimeError: no disk" in capsys.readouterr().err


def test_an_exception_whose_str_raises_does_not_get_out(upstream: Upstream, session: SessionMaker) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("mute")

    def fail(_: ModuleType) -> Observation:
        raise MuteError

    current = session(upstream.overlay(self_test=fail))
    current.arm()

    assert upstream.load().double(1) == 3
    assert only(current).reason == "MuteError: no text"


def test_strict_settles_every_target_before_it_raises(upstream: Upstream, session: SessionMaker) -> None:
    upstream.write(UNKNOWN_TEXT)
    upstream.write(FIXED_TEXT, module="other")
    upstream.load()
    upstream.load("other")
    other = Upstream(upstream.name, upstream.folder)
    target = upstream.overlay().target
    elsewhere = type(target)(distribution=upstream.name, module=f"{upstream.name}.other", symbol="double")
    second = upstream.overlay(
        id="other-fix", target=elsewhere, probe=lambda tree: other.probe(_OneModuleTree(tree, elsewhere.module))
    )
    current = session(upstream.overlay(), second, mode=Mode.STRICT)

    with pytest.raises(ActivationError, match="double-fix"):
        current.arm()

    assert [record.decision for record in current.audit().records] == [Decision.CONFLICT, Decision.RETIRED]


class _OneModuleTree:
    """A tree that answers with one module whatever is asked."""

    def __init__(self, tree: object, name: str) -> None:
        self._tree, self._name = tree, name

    def module(self, _: str) -> object:
        return self._tree.module(self._name)  # type: ignore[attr-defined]


def test_strict_raises_again_when_an_import_is_tried_again_after_it_was_armed_half_way(
    upstream: Upstream, session: SessionMaker
) -> None:
    current = session(upstream.overlay(), mode=Mode.STRICT)
    sys.arm_now = current.arm  # type: ignore[attr-defined]
    try:
        upstream.write("import sys\nsys.arm_now()\n" + UNKNOWN_TEXT)
        for _ in range(2):
            with pytest.raises(ActivationError):
                upstream.load()
    finally:
        del sys.arm_now  # type: ignore[attr-defined]
