"""Order does not matter: whatever comes first, the end state is the same and undo returns the original."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType

import pytest
from made_up import BROKEN_TEXT, FIXED_TEXT, Upstream
from places import HANG_S

from megacpp_overlays.loader.audit import Audit
from megacpp_overlays.loader.session import Session
from megacpp_overlays.model import Decision, Observation, Overlay, Record, Replacement

SessionMaker = Callable[..., Session]


def only(audit: Audit) -> Record:
    assert len(audit.records) == 1
    return audit.records[0]


def assert_active(session: Session, module: ModuleType) -> None:
    record = only(session.audit())
    assert record.decision is Decision.ACTIVE, record.reason
    assert module.double(1) == 2
    assert module.double.__wrapped__(1) == 3  # the first original, once


def test_armed_then_imported(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay())
    current.arm()
    assert only(current.audit()).decision is Decision.ARMED

    module = upstream.load()

    assert_active(current, module)


def test_imported_then_armed(upstream: Upstream, session: SessionMaker) -> None:
    module = upstream.load()
    current = session(upstream.overlay())

    current.arm()

    assert_active(current, module)


def test_armed_twice_by_one_session_and_again_by_another(upstream: Upstream, session: SessionMaker) -> None:
    first, second = session(upstream.overlay()), session(upstream.overlay())
    first.arm()
    first.arm()
    module = upstream.load()
    seam = module.double

    second.arm()

    assert_active(first, module)
    assert_active(second, module)
    assert module.double is seam


def test_armed_while_half_imported_in_the_same_thread(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay())
    sys.arm_now = current.arm  # type: ignore[attr-defined]
    try:
        upstream.write("import sys\nsys.arm_now()\n" + BROKEN_TEXT)
        module = upstream.load()
    finally:
        del sys.arm_now  # type: ignore[attr-defined]

    assert_active(current, module)
    assert type(module.__spec__).__name__ == "ModuleSpec"


def test_armed_while_half_imported_by_another_thread(upstream: Upstream, session: SessionMaker) -> None:
    reached, go_on = threading.Event(), threading.Event()
    threading.reached, threading.go_on = reached, go_on  # type: ignore[attr-defined]
    try:
        upstream.write("import threading\nthreading.reached.set()\nthreading.go_on.wait(3600)\n" + BROKEN_TEXT)
        importer = threading.Thread(target=upstream.load)
        importer.start()
        assert reached.wait(HANG_S)
        current = session(upstream.overlay())

        current.arm()
        assert only(current.audit()).decision is Decision.ARMED
        go_on.set()
        importer.join(HANG_S)
    finally:
        del threading.reached, threading.go_on  # type: ignore[attr-defined]

    assert_active(current, upstream.load())


def test_armed_while_half_imported_and_the_import_fails_and_is_tried_again(
    upstream: Upstream, session: SessionMaker
) -> None:
    current = session(upstream.overlay())
    sys.arm_now = current.arm  # type: ignore[attr-defined]
    try:
        upstream.write("import sys\nsys.arm_now()\nraise RuntimeError('first try')\n")
        with pytest.raises(RuntimeError, match="first try"):
            upstream.load()
    finally:
        del sys.arm_now  # type: ignore[attr-defined]
    assert only(current.audit()).decision is Decision.ARMED
    upstream.write(BROKEN_TEXT + "# another size, so that no stale bytecode is used\n")

    assert_active(current, upstream.load())


def test_from_many_threads_at_once(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay())
    barrier = threading.Barrier(8)

    def work(arm_first: bool) -> None:
        barrier.wait()
        for step in (current.arm, upstream.load) if arm_first else (upstream.load, current.arm):
            step()

    threads = [threading.Thread(target=work, args=(n % 2 == 0,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)

    assert_active(current, upstream.load())
    current.undo()
    assert not hasattr(upstream.load().double, "__wrapped__")


def test_reload_is_noticed_and_decided_again(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()

    importlib.reload(module)
    assert_active(current, module)
    importlib.reload(module)
    assert_active(current, module)

    current.undo()
    assert module.double(1) == 3
    assert not hasattr(module.double, "__wrapped__")


def test_reload_into_a_fixed_version_retires(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()
    upstream.write(FIXED_TEXT + "# another size, so that no stale bytecode is used\n")

    importlib.reload(module)

    assert only(current.audit()).decision is Decision.RETIRED
    assert module.double(1) == 2
    assert not hasattr(module.double, "__wrapped__")


def test_a_fresh_import_after_the_module_was_dropped_is_noticed(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay())
    current.arm()
    first = upstream.load()
    del sys.modules[upstream.module_name]

    second = upstream.load()

    assert second is not first
    assert_active(current, second)
    current.undo()
    assert (first.double(1), second.double(1)) == (3, 3)


def test_undone_stays_undone_until_it_is_armed_again(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()
    seam, original = module.double, module.double.__wrapped__

    current.undo("double-fix")
    importlib.reload(module)
    assert module.double(1) == 3
    assert only(current.audit()).reason == "undone in this process"

    current.arm()
    assert_active(current, module)
    assert module.double is not seam
    assert original(1) == 3


def test_undone_before_the_import_installs_nothing(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay())
    current.arm()
    current.undo()

    assert upstream.load().double(1) == 3
    assert only(current.audit()).decision is Decision.DISABLED


def test_stale_names_lead_to_the_seam_and_undo_leads_them_back(upstream: Upstream, session: SessionMaker) -> None:
    upstream.write("from .layers import double as twice\n", module="user")
    user = upstream.load("user")
    original = user.twice
    current = session(upstream.overlay())

    current.arm()

    assert user.twice(1) == 2
    assert only(current.audit()).rebound == (f"{upstream.name}.user.twice",)
    current.undo()
    assert user.twice is original


def test_an_original_that_is_held_where_no_name_can_be_rebound_is_a_conflict(
    upstream: Upstream, session: SessionMaker
) -> None:
    module = upstream.load()
    original = module.double
    registry = {"double": original, "other": None}
    current = session(upstream.overlay())

    current.arm()

    record = only(current.audit())
    assert record.decision is Decision.CONFLICT
    assert "a dict of 2 items" in record.reason
    assert "import megacpp_overlays first" in record.reason
    assert module.double is original is registry["double"]


def test_two_overlays_on_one_module_are_settled_together(upstream: Upstream, session: SessionMaker) -> None:
    minus_one = Replacement(symbol="Layer.static", make=lambda original, _: lambda x: original(x) - 1)
    other = upstream.overlay(
        id="static-fix",
        witness=None,
        replacements={"off-by-one": (minus_one,)},
        self_test=lambda module: Observation(broken=module.Layer.static(1) != 1, seen="static"),
    )
    current = session(upstream.overlay(), other)
    current.arm()

    module = upstream.load()

    assert (module.double(1), module.Layer.static(1)) == (2, 1)
    assert [record.decision for record in current.audit().records] == [Decision.ACTIVE, Decision.ACTIVE]
    current.undo("double-fix")
    assert (module.double(1), module.Layer.static(1)) == (3, 1)


def constructor_overlay(upstream: Upstream) -> Overlay:
    def mark(original: Callable[..., None], _: ModuleType) -> Callable[..., None]:
        def __init__(self: object) -> None:  # noqa: N807 - it becomes a constructor
            original(self)
            vars(self)["seen"] = True

        return __init__

    return upstream.overlay(
        replacements={"off-by-one": (Replacement(symbol="Layer.__init__", make=mark),)},
        witness=None,
        self_test=lambda module: Observation(broken=not hasattr(module.Layer(), "seen"), seen="a built layer"),
    )


@pytest.mark.parametrize("name", ["Layer", "Child"])
def test_an_instance_that_was_built_before_its_constructor_was_repaired_is_a_conflict(
    upstream: Upstream, session: SessionMaker, name: str
) -> None:
    module = upstream.load()
    built = getattr(module, name)()
    current = session(constructor_overlay(upstream))

    current.arm()

    record = only(current.audit())
    assert record.decision is Decision.CONFLICT
    assert f"1 of {upstream.module_name}.Layer" in record.reason
    assert not hasattr(module.Layer(), "seen")
    del built


def test_unreachable_instances_do_not_count(upstream: Upstream, session: SessionMaker) -> None:
    module = upstream.load()
    circle = module.Layer()
    circle.itself = circle
    del circle
    current = session(constructor_overlay(upstream))

    current.arm()

    assert only(current.audit()).decision is Decision.ACTIVE


def test_instances_that_were_built_while_an_overlay_was_undone_on_purpose_do_not_count(
    upstream: Upstream, session: SessionMaker
) -> None:
    current = session(constructor_overlay(upstream))
    current.arm()
    module = upstream.load()
    current.undo()
    built = module.Layer()

    current.arm()

    assert only(current.audit()).decision is Decision.ACTIVE
    assert (hasattr(built, "seen"), hasattr(module.Layer(), "seen")) == (False, True)
