"""The listener hears of every complete execution of a watched module, once, and nothing it raises gets out."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from made_up import BROKEN_TEXT, Upstream

from megacpp_overlays.errors import ActivationError
from megacpp_overlays.loader.import_hooks import Hooks, is_half_imported


class Ear:
    """A listener that records each event, and raises the error that the test sets."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, bool]] = []
        self.error: Exception | None = None
        self.failures: list[str] = []

    def loaded(self, name: str, module: ModuleType, *, late: bool) -> None:
        self.heard.append((name, late))
        assert module.double(1) == 3  # complete
        if self.error is not None:
            raise self.error

    def failed(self, name: str, error: Exception) -> None:
        self.failures.append(f"{name}: {error}")


@pytest.fixture
def ear() -> Ear:
    return Ear()


@pytest.fixture
def watching(ear: Ear) -> Iterator[Hooks]:
    made = Hooks(ear)
    yield made
    made.close()


def test_an_import_is_heard_once_and_is_not_late(upstream: Upstream, ear: Ear, watching: Hooks) -> None:
    watching.watch(upstream.module_name)
    watching.watch(upstream.module_name)

    upstream.load()
    upstream.load()

    assert ear.heard == [(upstream.module_name, False)]


def test_a_loaded_module_is_heard_at_once_and_is_late(upstream: Upstream, ear: Ear, watching: Hooks) -> None:
    upstream.load()

    watching.watch(upstream.module_name)

    assert ear.heard == [(upstream.module_name, True)]


def test_every_later_execution_is_heard(upstream: Upstream, ear: Ear, watching: Hooks) -> None:
    watching.watch(upstream.module_name)
    module = upstream.load()

    importlib.reload(module)
    del sys.modules[upstream.module_name]
    upstream.load()

    assert [late for _, late in ear.heard] == [False, True, True]
    assert type(sys.modules[upstream.module_name].__spec__.loader) is importlib.machinery.SourceFileLoader  # type: ignore[union-attr]


def test_a_first_import_is_announced_once_and_not_after_closing(upstream: Upstream, watching: Hooks) -> None:
    announced: list[str] = []
    upstream.write("", module="other")
    for name in (upstream.module_name, upstream.module_name, f"{upstream.name}.other"):
        watching.once_imported(name, lambda name=name: announced.append(name))  # type: ignore[misc]

    upstream.load()
    watching.close()
    upstream.load("other")

    assert announced == [upstream.module_name]


def test_after_closing_nothing_is_heard(upstream: Upstream, ear: Ear, watching: Hooks) -> None:
    watching.watch(upstream.module_name)
    watching.close()
    watching.close()

    importlib.reload(upstream.load())

    assert ear.heard == []


def test_an_error_of_the_listener_goes_to_the_listener_and_not_to_the_import(
    upstream: Upstream, ear: Ear, watching: Hooks
) -> None:
    ear.error = ImportError("no kernel")
    watching.watch(upstream.module_name)

    assert upstream.load().double(1) == 3
    assert ear.failures == [f"{upstream.module_name}: no kernel"]


def test_only_an_error_of_strict_mode_stops_the_import_and_a_second_try_is_stopped_too(
    upstream: Upstream, ear: Ear, watching: Hooks
) -> None:
    ear.error = ActivationError("asked for")
    watching.watch(upstream.module_name)

    for _ in range(2):
        with pytest.raises(ActivationError, match="asked for"):
            upstream.load()


def test_a_reload_that_fails_is_upstreams_error_and_is_not_heard(upstream: Upstream, ear: Ear, watching: Hooks) -> None:
    watching.watch(upstream.module_name)
    module = upstream.load()
    upstream.write("raise RuntimeError('broken on disk, and of another size')\n")

    with pytest.raises(RuntimeError, match="broken on disk"):
        importlib.reload(module)

    assert len(ear.heard) == 1


def test_a_module_that_is_gone_is_not_found_as_ever(upstream: Upstream, watching: Hooks) -> None:
    watching.watch(upstream.module_name)
    upstream.load()
    del sys.modules[upstream.module_name]
    (upstream.folder / upstream.name / "layers.py").unlink()
    importlib.invalidate_caches()

    with pytest.raises(ModuleNotFoundError):
        upstream.load()


def test_finders_of_an_older_kind_are_passed_by(
    upstream: Upstream, ear: Ear, watching: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching.watch(upstream.module_name)
    module = upstream.load()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path[:1], object(), *sys.meta_path[1:]])

    importlib.reload(module)

    assert len(ear.heard) == 2


def test_a_module_that_is_watched_while_it_is_executed_is_heard_when_it_is_complete(
    upstream: Upstream, ear: Ear, watching: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile: list[tuple[bool, int]] = []

    def watch(name: str) -> None:
        watching.watch(name)
        meanwhile.append((is_half_imported(sys.modules[name]), len(ear.heard)))

    monkeypatch.setattr(sys, "watch_now", watch, raising=False)
    upstream.write("import sys\nsys.watch_now(__name__)\n" + BROKEN_TEXT)

    module = upstream.load()

    assert meanwhile == [(True, 0)]
    assert ear.heard == [(upstream.module_name, True)]
    assert type(module.__spec__) is importlib.machinery.ModuleSpec


class CompletedMeanwhile(importlib.machinery.ModuleSpec):
    """A spec whose module is half imported when it is first asked, and complete from then on."""

    @property
    def _initializing(self) -> bool:
        first, self.__dict__["asked"] = "asked" not in self.__dict__, True
        return first


def test_a_module_that_another_thread_completes_at_the_last_moment_is_heard_once(
    upstream: Upstream, ear: Ear, watching: Hooks
) -> None:
    module = upstream.load()
    assert module.__spec__ is not None
    module.__spec__.__class__ = CompletedMeanwhile

    watching.watch(upstream.module_name)

    assert ear.heard == [(upstream.module_name, True)]
