"""Foreign changes of the import system, of streams and of this package itself: no import fails and no report is wrong."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any

import launchers
import pytest
import wrapt
from made_up import BROKEN_TEXT, Upstream, gate_of
from places import HANG_S, ROOT

from megacpp_overlays.errors import SourceError
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import LogForm, Mode
from megacpp_overlays.model import Decision, Record
from megacpp_overlays.source.trees import InstalledTree

SessionMaker = Callable[..., Session]


def only(session: Session) -> Record:
    (record,) = session.audit().records
    return record


# Streams.


class Broken:
    """A stream whose every use raises."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        raise self.error(name)

    def write(self, text: str) -> int:
        raise self.error(text)


@pytest.mark.parametrize("error", [ValueError, TypeError, RuntimeError, AttributeError, OSError])
@pytest.mark.parametrize("form", [LogForm.STDERR, LogForm.JSON, LogForm.LOGGING])
def test_a_broken_stderr_stops_no_import(
    upstream: Upstream,
    session: SessionMaker,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
    form: LogForm,
) -> None:
    monkeypatch.setattr(sys, "stderr", Broken(error))
    current = session(upstream.overlay(), log=form)
    current.arm()

    assert upstream.load().double(1) == 2
    assert only(current).decision is Decision.ACTIVE


def test_a_process_whose_stderr_is_broken_imports_us_and_a_target(
    upstream: Upstream, run_python: Callable[..., CompletedProcess[str]]
) -> None:
    code = (
        "import sys\n"
        "class Broken:\n"
        "    def write(self, text): raise TypeError(text)\n"
        "    def flush(self): raise RuntimeError\n"
        "sys.stderr = Broken()\n"
        "import megacpp_overlays\n"
        f"import {upstream.module_name} as layers\n"
        "print(layers.double(1))\n"
    )
    env = launchers.environment(upstream)
    done = run_python(code, check=False, **env)  # Python itself cannot flush such a stream when it ends

    assert done.stdout == "2\n"


# Finders, and objects in the place of modules.


class Rude:
    """A finder that raises whenever it is asked for a name."""

    def __init__(self, error: Exception, about: str) -> None:
        self.error, self.about = error, about

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.startswith(self.about):
            raise self.error


@pytest.mark.parametrize("error", [AttributeError("x"), RuntimeError("x"), TypeError("x")])
def test_a_finder_that_raises_stops_no_arming_and_makes_nothing_absent(
    upstream: Upstream, session: SessionMaker, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    finder: Any = Rude(error, "not_here")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    gate = gate_of(Upstream("not_here", upstream.folder))
    current = session(gate, upstream.overlay())

    current.arm()

    assert upstream.load().double(1) == 2
    assert [each.decision for each in current.audit().records] == [Decision.CONFLICT, Decision.ACTIVE]
    with pytest.raises(SourceError, match="Rude does not say where not_here is"):
        InstalledTree().module("not_here.layers")


def test_a_finder_that_looks_for_parents_imports_none_of_them(
    upstream: Upstream, session: SessionMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the finder of ddtrace does, which asks `importlib.util.find_spec`."""

    class Tracer:
        def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
            if getattr(self, "busy", False) or not name.startswith(upstream.name):
                return None
            self.busy = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.busy = False

    finder: Any = Tracer()
    current = session(upstream.overlay())
    current.arm()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])

    assert only(current).decision is Decision.ARMED
    assert InstalledTree().module(f"{upstream.name}.inner.nothing") is None
    assert upstream.name not in sys.modules
    assert upstream.load().double(1) == 2


class RudeModule:
    """Something in the place of a module that raises when it is looked at."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __getattribute__(self, name: str) -> Any:
        raise object.__getattribute__(self, "error")(name)


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_a_proxy_in_the_place_of_a_target_stops_no_arming(
    upstream: Upstream, session: SessionMaker, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    thing: Any = RudeModule(error)
    monkeypatch.setitem(sys.modules, upstream.module_name, thing)
    current = session(upstream.overlay())

    current.arm()

    assert only(current).decision is not Decision.ACTIVE


# Modules that are not executed to their end.


def lazily(upstream: Upstream) -> ModuleType:
    spec = importlib.util.find_spec(upstream.module_name)
    assert spec is not None
    assert spec.loader is not None
    loader = importlib.util.LazyLoader(spec.loader)
    spec.loader = loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[upstream.module_name] = module
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("armed_first", [True, False])
def test_a_target_that_is_loaded_lazily_is_not_woken_and_settled_when_it_wakes(
    upstream: Upstream, session: SessionMaker, armed_first: bool
) -> None:
    current = session(upstream.overlay())
    if armed_first:
        current.arm()
    module = lazily(upstream)
    current.arm()

    assert only(current).decision is Decision.ARMED
    assert type(module).__name__ == "_LazyModule"
    assert module.double(1) == 2
    assert only(current).decision is Decision.ACTIVE


@pytest.mark.parametrize("strict", [False, True])
def test_a_target_that_a_recipe_of_another_thread_is_executing_is_waited_for(
    upstream: Upstream, session: SessionMaker, strict: bool
) -> None:
    """The import system says that it is at it; a recipe with `exec_module` says nothing."""
    begun, go_on = threading.Event(), threading.Event()
    sys.half_way = lambda: (begun.set(), go_on.wait(HANG_S))  # type: ignore[attr-defined]
    upstream.write("import sys\nsys.half_way()\n" + BROKEN_TEXT)
    path = upstream.folder / upstream.name / "layers.py"

    def work() -> None:
        spec = importlib.util.spec_from_file_location(upstream.module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[upstream.module_name] = module
        spec.loader.exec_module(module)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(HANG_S)
    current = session(upstream.overlay(), mode=Mode.STRICT if strict else Mode.AUTO)

    current.arm()
    assert only(current).decision is Decision.ARMED
    go_on.set()
    thread.join(HANG_S)
    del sys.half_way  # type: ignore[attr-defined]

    assert only(current).decision is Decision.ACTIVE
    assert sys.modules[upstream.module_name].double(1) == 2


# This package itself.


def test_a_second_import_of_this_package_is_the_first(
    run_python: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "megacpp_overlays").symlink_to(ROOT / "megacpp_overlays")
    code = (
        "import sys, megacpp_overlays as first\n"
        "from megacpp_overlays.model import Decision\n"
        "def purge(*names):\n"
        "    for name in names or [n for n in sys.modules if n.partition('.')[0] == 'megacpp_overlays']:\n"
        "        sys.modules.pop(name, None)\n"
        "first.audit()\n"
        "purge()\n"
        "import megacpp_overlays\n"
        "assert megacpp_overlays is first\n"
        "from megacpp_overlays.model import Decision as second\n"
        "assert second is Decision\n"
        "purge('megacpp_overlays.model', 'megacpp_overlays.loader.rendering')\n"
        "from megacpp_overlays.model import Decision as third\n"
        "assert third is Decision\n"
        f"purge(); sys.path.insert(0, {str(tmp_path)!r})\n"
        "import megacpp_overlays as other\n"
        "assert other is first\n"
        "str(first.audit()); other.undo(); other.arm(); str(other.audit())\n"
        "import importlib; importlib.reload(first)\n"
        "print('one copy', first.audit().fingerprint == other.audit().fingerprint)\n"
    )
    assert run_python(code).stdout == "one copy True\n"


def test_a_plugin_that_imports_this_package_may_come_first(
    upstream: Upstream, run_python: Callable[..., CompletedProcess[str]]
) -> None:
    env = launchers.environment(upstream)
    path = upstream.folder / upstream.name / "plugin.py"
    path.write_text(f"import megacpp_overlays\n{path.read_text()}")
    code = (
        f"import {upstream.name}.plugin, {upstream.module_name} as layers, megacpp_overlays\n"
        "print(layers.double(1), [r.decision.value for r in megacpp_overlays.audit().records if r.overlay.pack == 99])\n"
    )

    assert run_python(code, **env).stdout == "2 ['active']\n"


def test_a_hook_that_an_interrupt_left_with_wrapt_is_dead(
    upstream: Upstream, session: SessionMaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    current = session(upstream.overlay())
    register = wrapt.register_post_import_hook

    def interrupted(*arguments: Any) -> None:
        register(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(wrapt, "register_post_import_hook", interrupted)
        with pytest.raises(KeyboardInterrupt):
            current.arm()

    current.arm()

    assert upstream.load().double(1) == 2
    assert capsys.readouterr().err.count("active: double-fix") == 1
