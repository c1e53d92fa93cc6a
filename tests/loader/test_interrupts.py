"""Interrupts at any line of arming, undoing and settling: a repeated call succeeds, and audits report the actual state."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from made_up import FIXED_TEXT, Upstream
from places import HANG_S, ROOT, SUPPORT

from megacpp_overlays.errors import SeamError
from megacpp_overlays.loader.session import Session
from megacpp_overlays.model import Decision, Observation, Record

pytestmark = pytest.mark.unmeasured_children

SessionMaker = Callable[..., Session]


def only(session: Session) -> Record:
    (record,) = session.audit().records
    return record


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        pytest.param("MemoryError", ["--few"], id="few"),
        pytest.param("KeyboardInterrupt", [], marks=pytest.mark.full),
        pytest.param("MemoryError", [], marks=pytest.mark.full),
    ],
)
def test_after_an_error_at_any_line_the_call_can_be_repeated_and_the_error_is_reported(
    error: str, lines: list[str]
) -> None:
    """Every line of the loader that one of seven scenarios executes, and of those of several a third in each, the first time."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, SUPPORT)))}
    command = [sys.executable, "-W", "ignore", str(SUPPORT / "interrupted.py"), error, *lines]

    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_S, check=False)

    scenarios = [line for line in done.stdout.splitlines() if line.endswith(" points")]
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(scenarios) == 7
    assert [line for line in done.stdout.splitlines() if line not in scenarios] == []


class RefusingModule(ModuleType):
    """A module that refuses its next assignments."""

    def __setattr__(self, name: str, value: object) -> None:
        if left := vars(self).get("refuses", 0):
            vars(self)["refuses"] = left - 1
            raise KeyboardInterrupt if vars(self)["interrupts"] else RuntimeError("not now")
        super().__setattr__(name, value)


@pytest.mark.parametrize("interrupts", [True, False])
def test_an_undo_that_fails_is_reported_and_can_be_repeated(
    upstream: Upstream, session: SessionMaker, interrupts: bool
) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()
    module.__class__ = RefusingModule
    vars(module).update(refuses=2, interrupts=interrupts)

    with pytest.raises(KeyboardInterrupt if interrupts else SeamError):
        current.undo()

    assert module.double(1) == 2
    assert only(current).decision is Decision.CONFLICT
    vars(module)["refuses"] = 0
    current.undo()
    assert module.double(1) == 3
    assert only(current).decision is Decision.DISABLED


def test_arming_after_an_undo_that_a_wrapper_stopped_tells_the_truth(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()
    ours = module.double
    module.double = functools.wraps(ours)(lambda x: ours(x))
    with pytest.raises(SeamError, match="was replaced after us"):
        current.undo()
    assert only(current).decision is Decision.CONFLICT

    current.arm()

    assert module.double(1) == 2
    assert only(current).decision is Decision.ACTIVE
    assert "is wrapped by" in only(current).reason
    module.double = ours  # the wrapper goes
    current.undo()
    assert module.double(1) == 3
    assert only(current).decision is Decision.DISABLED


def test_a_wrapper_without_a_link_to_the_seam_is_a_conflict_until_it_is_removed(
    upstream: Upstream, session: SessionMaker
) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()
    ours = module.double
    module.double = lambda x: ours(x)
    with pytest.raises(SeamError, match="was replaced after us"):
        current.undo()

    current.arm()
    assert only(current).decision is Decision.CONFLICT
    module.double = ours
    current.undo()

    assert module.double(1) == 3
    assert only(current).decision is Decision.DISABLED


def test_the_reason_of_a_conflict_goes_with_its_cause(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()
    ours = module.double
    module.double = lambda x: x
    with contextlib.suppress(SeamError):
        current.undo()

    module.double = ours
    current.undo()

    assert only(current).reason == "undone in this process"


def test_an_error_after_the_seams_are_in_takes_them_out(
    upstream: Upstream, session: SessionMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of a seam must be true, whatever fails between putting it in and reporting it."""
    current = session(upstream.overlay())

    def nameless(_: object) -> str:
        raise RuntimeError("cannot be named")

    with monkeypatch.context() as patch:
        patch.setattr("megacpp_overlays.loader.seams.Seam.__str__", nameless)
        current.arm()
        module = upstream.load()
        decision = next(iter(current.parts.values())).record.decision

    assert (decision, module.double(1)) in [(Decision.CONFLICT, 3), (Decision.ACTIVE, 2)]
    assert only(current).decision is decision


def test_a_child_that_was_forked_in_the_middle_of_a_self_test_undoes_the_seams_of_its_parent(
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

    child = os.fork()
    if child == 0:  # only this thread is in the child
        code = 9
        try:
            current.renew_locks()  # as a session of a process does by itself
            module = sys.modules[upstream.module_name]
            said = only(current).decision
            current.undo()
            code = (
                0
                if (said, module.double(1), only(current).decision)
                == (
                    Decision.CONFLICT,
                    3,
                    Decision.DISABLED,
                )
                else 1
            )
        finally:
            os._exit(code)
    go_on.set()
    importer.join(HANG_S)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert only(current).decision is Decision.ACTIVE


def test_a_lock_that_an_interrupt_left_taken_blocks_no_later_call(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()
    current.locks.at(upstream.module_name).try_acquire()  # by this thread, which is in no call of the session

    undoer = threading.Thread(target=current.undo)
    undoer.start()
    undoer.join(HANG_S)

    assert module.double(1) == 3


# Replaced objects are released.


def test_nothing_of_replaced_executions_stays_alive(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()
    met: list[weakref.ref[Any]] = []
    for _ in range(5):
        met += [weakref.ref(module.double), weakref.ref(module.double.__wrapped__), weakref.ref(module.Layer)]
        importlib.reload(module)
    met.append(weakref.ref(module))
    sys.modules.pop(upstream.module_name)
    module = upstream.load()

    gc.collect()

    assert [each() for each in met if each() is not None] == []
    assert module.double(1) == 2
    assert only(current).decision is Decision.ACTIVE


RELOADED = """
import gc, importlib, os, weakref
from pathlib import Path
from made_up import BROKEN_TEXT, Upstream
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import Settings

upstream = Upstream("reloaded_upstream", Path(os.environ["FOLDER"]))
upstream.write(BROKEN_TEXT)
Session([upstream.overlay()], Settings()).arm()
module = upstream.load()

def objects_after(reloads):
    for _ in range(reloads):
        importlib.reload(module)
    gc.collect()
    return sum(type(each) is not weakref.ref for each in gc.get_objects())  # dead ones are swept now and then

before = objects_after(5)
print(objects_after(50) - before, module.double(4))
"""


def test_a_reload_does_not_cost_more_than_the_one_before(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """In objects that stay: the time follows them, and says more of the host than of us."""
    more, doubled = run_python(RELOADED, tmp_path, ROOT, SUPPORT, FOLDER=str(tmp_path)).stdout.split()

    assert int(more) < 10, "fifty reloads left something alive"
    assert doubled == "8"


def test_undone_objects_are_released(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()
    seam = weakref.ref(module.double)
    current.undo()

    gc.collect()

    assert seam() is None


def test_names_on_an_old_seam_are_led_back_after_a_repair(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()
    upstream.write("from .layers import double as twice\n", module="user")
    user = upstream.load("user")
    upstream.write(FIXED_TEXT + "# another size, so that no stale bytecode is used\n")
    importlib.reload(module)
    assert only(current).decision is Decision.RETIRED

    current.undo()

    assert user.twice(1) == 3
    assert Path(user.twice.__code__.co_filename).name == "layers.py"
