"""Arming while another thread is half-way through the import of a target: no false decision and no error, however it is loaded.

Where the import system announces the end of the import, the overlay goes in then. A loader of third-party code announces nothing;
the next audit, or the next `arm`, finds the module that it made.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import releases
from made_up import BROKEN_TEXT, Upstream
from places import HANG_S

from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import Mode
from megacpp_overlays.model import Decision, Evidence, Finding, Observation, Record, Verdict

SessionMaker = Callable[..., Session]
Pause = Callable[[str], None]


def only(session: Session) -> Record:
    (record,) = session.audit().records
    return record


class Halfway:
    """One place at which a thread that loads a module stops, until it may go on."""

    def __init__(self, place: str) -> None:
        self._place = place
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, place: str) -> None:
        """Stop here, if this is the place."""
        if place == self._place:
            self.reached.set()
            self.go_on.wait(HANG_S)


class Finder:
    """A finder that gives one module a third-party loader."""

    def __init__(self, name: str, loader: object) -> None:
        self._name, self._loader = name, loader

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self._loader) if name == self._name else None  # type: ignore[arg-type]


class ExecLoader:
    """A loader of today."""

    def __init__(self, file: str, pause: Pause) -> None:
        self._file, self._pause = file, pause

    def create_module(self, _: object) -> None:
        """Leave it to the import system."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__file__"] = self._file
        self._pause("before")
        exec(code_of(self._file), vars(module))
        self._pause("after")


class LoadLoader:
    """A loader from before PEP 451: it makes the module itself, and the import system does not say that it is at it."""

    def __init__(self, file: str, pause: Pause) -> None:
        self._file, self._pause = file, pause

    def load_module(self, name: str) -> ModuleType:
        module = sys.modules.setdefault(name, ModuleType(name))
        vars(module).update(__file__=self._file, __loader__=self, __package__=name.rpartition(".")[0])
        self._pause("before")
        exec(code_of(self._file), vars(module))
        self._pause("after")
        return module


def code_of(file: str) -> Any:
    with open(file) as text:
        return compile(text.read(), file, "exec")


@contextlib.contextmanager
def first(finder: Finder) -> Iterator[None]:
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]


def by_a_loader_of_today(name: str, file: str, pause: Pause) -> None:
    with first(Finder(name, ExecLoader(file, pause))):
        importlib.import_module(name)


def by_a_loader_of_old(name: str, file: str, pause: Pause) -> None:
    with first(Finder(name, LoadLoader(file, pause))):
        importlib.import_module(name)


def by_a_spec(name: str, file: str, pause: Pause) -> None:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    pause("before")
    spec.loader.exec_module(module)
    pause("after")


def by_exec(name: str, file: str, pause: Pause) -> None:
    module = sys.modules[name] = ModuleType(name)
    vars(module)["__file__"] = file
    pause("before")
    exec(code_of(file), vars(module))
    pause("after")


def by_exec_into_something_else(name: str, file: str, pause: Pause) -> None:
    """The module gets all of it at once, at the end."""
    module = sys.modules[name] = ModuleType(name)
    namespace = {"__name__": name, "__file__": file}
    pause("before")
    exec(code_of(file), namespace)
    pause("after")
    vars(module).update(namespace)


def by_exec_with_locals(name: str, file: str, pause: Pause) -> None:
    """Execute the file so that its definitions get another global namespace than the module."""
    module = sys.modules[name] = ModuleType(name)
    vars(module)["__file__"] = file
    pause("before")
    exec(code_of(file), {"__name__": name, "sys": sys}, vars(module))
    pause("after")


WAYS = (
    by_a_loader_of_today,
    by_a_loader_of_old,
    by_a_spec,
    by_exec,
    by_exec_into_something_else,
    by_exec_with_locals,
)
TOLD = {by_a_loader_of_today}
"""Ways of loading in which the import system announces that the module is complete."""
PLACES = ("before", "first line", "middle", "last line", "after")
HALF_WAY = [*itertools.product(WAYS, PLACES)]
DONE = {by_a_loader_of_old, by_a_spec, by_exec, by_exec_with_locals}
"""Ways of loading after which the module is complete once its last line was executed."""


@pytest.mark.filterwarnings("ignore::ImportWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "strict", [pytest.param(False, id="auto"), pytest.param(True, id="strict", marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("way", "place"),
    releases.only(HALF_WAY, HALF_WAY[::2]),  # each way at some places, and each place on some ways
    ids=[f"{way.__name__}-{place}" for way, place in HALF_WAY],
)
def test_armed_by_one_thread_while_another_one_is_half_way(
    upstream: Upstream,
    session: SessionMaker,
    monkeypatch: pytest.MonkeyPatch,
    way: Callable[[str, str, Pause], None],
    place: str,
    strict: bool,
) -> None:
    pause = Halfway(place)
    monkeypatch.setattr(sys, "half_way", pause, raising=False)
    middle = BROKEN_TEXT.replace("\n\nclass Layer:", "\n\nsys.half_way('middle')\n\n\nclass Layer:")
    upstream.write(f"import sys\nsys.half_way('first line')\n{middle}\nsys.half_way('last line')\n")
    importlib.import_module(upstream.name)
    file = str(upstream.folder / upstream.name / "layers.py")
    thread = threading.Thread(target=way, args=(upstream.module_name, file, pause))
    thread.start()
    assert pause.reached.wait(HANG_S)
    current = session(upstream.overlay(), mode=Mode.STRICT if strict else Mode.AUTO)
    complete = place == "after" and way in DONE

    current.arm()
    said = [only(current).decision]
    current.arm()
    said.append(only(current).decision)
    pause.go_on.set()
    thread.join(HANG_S)
    module = sys.modules[upstream.module_name]
    at_once = module.double(1) == 2

    assert said == [Decision.ACTIVE if complete else Decision.ARMED] * 2
    assert at_once == (complete or way in TOLD)
    if way is by_exec_into_something_else:
        assert only(current).decision is Decision.CONFLICT
        assert "still held by" in only(current).reason  # the namespace by which its functions call each other
        return
    assert only(current).decision is Decision.ACTIVE
    assert module.double(1) == 2


CIRCLE = "from . import state\n\n\n" + BROKEN_TEXT.replace("CALLS = []", "").replace(
    "return x + x + 1", "return x + state.twice(x) - x + 1"
)
"""A target whose function calls into a module that is still being executed when the target is complete."""
STATE = "from . import layers\n\n\ndef twice(x):\n    return x + x\n"


def test_a_witness_does_not_call_into_a_half_imported_module(upstream: Upstream, session: SessionMaker) -> None:
    upstream.write(CIRCLE)
    upstream.write(STATE, module="state")
    asked = list[str]()

    def witness(module: ModuleType) -> Observation:
        asked.append(module.__name__)
        return Observation(broken=module.double(1) != 2, seen=f"double(1) = {module.double(1)}")

    overlay = upstream.overlay(
        probe=lambda _: Finding(verdict=Verdict.BROKEN, shape="off-by-one", evidence=(Evidence("adds one"),)),
        witness=witness,
        self_test=lambda _: Observation(broken=False, seen="calls nothing"),
    )
    current = session(overlay)
    current.arm()
    upstream.load("state")  # which imports the target on its first line

    assert only(current).decision is Decision.ACTIVE
    assert asked == []
    assert upstream.load().double(1) == 2
    current.undo()
    current.arm()
    assert asked == [upstream.module_name]  # now that it can run
