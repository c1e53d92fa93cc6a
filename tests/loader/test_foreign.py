"""Third-party code in the place of code that a finding was read from: it is named, and no overlay is active over it."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from made_up import BROKEN_TEXT, FIXED_TEXT, Upstream
from places import HANG_S

from megacpp_overlays.errors import ActivationError
from megacpp_overlays.loader import install, probing
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import Mode
from megacpp_overlays.model import (
    Decision,
    Evidence,
    Finding,
    Observation,
    Overlay,
    ReadingKind,
    Record,
    Replacement,
    Verdict,
)
from megacpp_overlays.runtime import calls
from megacpp_overlays.runtime.in_this_thread import answer
from megacpp_overlays.source.trees import InstalledTree, SourceTree

SessionMaker = Callable[..., Session]

HELPERS = """
import functools


def half(x):
    return x // 2


def logged(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper


@logged
def third(x):
    return x // 3


class Router:
    def route(self, x):
        return x

    @property
    def size(self):
        return 1

    @size.setter
    def size(self, value):
        pass

    @staticmethod
    def name():
        return "router"

    def unread(self):
        return 0
"""
CALLER = "from .helpers import half, half as a_half\n"
READ = ("half", "third", "Router.route", "Router.size", "Router.name")
"""The symbols of the helpers that the probe reads."""


class TwoModuleUpstream:
    """An upstream of two modules, and an overlay whose finding rests on both."""

    def __init__(self, upstream: Upstream, text: str = BROKEN_TEXT) -> None:
        upstream.write(HELPERS, module="helpers")
        upstream.write(CALLER + text)
        self.upstream = upstream
        self.overlay: Overlay = upstream.overlay(probe=self._probe)

    def _probe(self, tree: SourceTree) -> Finding:
        found = self.upstream.probe(tree)
        helpers, layers = (tree.module(f"{self.upstream.name}.{name}") for name in ("helpers", "layers"))
        assert helpers is not None
        assert layers is not None
        for symbol in READ:
            helpers.bindings.of(symbol)
        layers.function("Layer.forward")
        layers.bindings.of("half")
        return found

    @property
    def helpers(self) -> Any:
        return self.upstream.load("helpers")

    @property
    def layers(self) -> Any:
        return self.upstream.load()


@pytest.fixture
def rested(upstream: Upstream) -> TwoModuleUpstream:
    return TwoModuleUpstream(upstream)


def the_record(session: Session, *, deep: bool = False) -> Record:
    (record,) = session.audit(deep=deep).records
    return record


def foreign(*_: Any) -> int:
    """A function that another library puts in the place of upstream's."""
    return 7


def wrap(original: Any) -> Any:
    return functools.wraps(original)(lambda *args: original(*args))


def replace_in(module: Any, symbol: str, value: Any) -> Any:
    *path, name = symbol.split(".")
    setattr(functools.reduce(getattr, path, module), name, value)


def another_of_its_name(kind: type) -> type:
    """Return a class of another library with the name and the very methods of one of upstream."""
    methods = {name: value for name, value in vars(kind).items() if callable(value)}
    return type(kind.__name__, (), {**methods, "__module__": "other_lib.patches"})


PATCHES: dict[str, Callable[[TwoModuleUpstream], None]] = {
    "a function": lambda it: replace_in(it.helpers, "half", foreign),
    "a function, by a wrapper that names it": lambda it: replace_in(it.helpers, "half", wrap(it.helpers.half)),
    "a decorated function": lambda it: replace_in(it.helpers, "third", foreign),
    "a method": lambda it: replace_in(it.helpers, "Router.route", foreign),
    "a property": lambda it: replace_in(it.helpers, "Router.size", property(foreign)),
    "a static method": lambda it: replace_in(it.helpers, "Router.name", staticmethod(foreign)),
    "a class": lambda it: replace_in(it.helpers, "Router", type("Router", (it.helpers.Router,), {})),
    "a class, by nothing": lambda it: replace_in(it.helpers, "Router", None),
    "a class, by something else": lambda it: replace_in(it.helpers, "Router", SimpleNamespace()),
    "a class, by another of its name": lambda it: replace_in(it.layers, "Layer", another_of_its_name(it.layers.Layer)),
    "an imported name": lambda it: replace_in(it.layers, "half", foreign),
    "a caller in the target": lambda it: replace_in(it.layers, "Layer.forward", foreign),
    "a method, taken away": lambda it: delattr(it.helpers.Router, "route"),
}
each_patch = pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)


def test_a_finding_knows_the_definitions_that_it_was_read_from(rested: TwoModuleUpstream) -> None:
    read = probing.examine(rested.overlay, InstalledTree()).read

    name = rested.upstream.name
    assert {(each.module.removeprefix(f"{name}."), each.symbol, each.kind) for each in read} == {
        *(("helpers", symbol, ReadingKind.FUNCTION) for symbol in READ),
        ("layers", "double", ReadingKind.FUNCTION),
        ("layers", "Layer", ReadingKind.CLASS),
        ("layers", "Layer.forward", ReadingKind.FUNCTION),
        ("layers", "half", ReadingKind.IMPORT),
    }
    assert {each.origin for each in read if each.kind is ReadingKind.IMPORT} == {f"{name}.helpers:half"}


def test_upstream_as_it_was_read_is_active_and_stays_so(rested: TwoModuleUpstream, session: SessionMaker) -> None:
    current = session(rested.overlay)
    current.arm()

    assert rested.layers.double(1) == 2
    assert the_record(current).decision is Decision.ACTIVE
    rested.helpers.Router.unread = foreign  # which the finding does not rest on
    assert the_record(current, deep=True).decision is Decision.ACTIVE


OPTIONAL = """
try:
    import a_library_that_is_not_there
except ImportError:
    Fused = None
else:
    class Fused:
        def route(self, x):
            return x
"""


def test_a_class_that_needs_a_missing_library_is_upstreams_none(upstream: Upstream, session: SessionMaker) -> None:
    upstream.write(BROKEN_TEXT + OPTIONAL)

    def probe(tree: SourceTree) -> Finding:
        source = tree.module(upstream.module_name)
        assert source is not None
        source.bindings.of("Fused")
        return upstream.probe(tree)

    overlay = upstream.overlay(probe=probe)
    current = session(overlay)
    current.arm()
    module = upstream.load()

    read = probing.examine(overlay, InstalledTree()).read
    assert (ReadingKind.CLASS, "Fused") in {(each.kind, each.symbol) for each in read}
    assert module.Fused is None
    assert the_record(current).decision is Decision.ACTIVE
    module.Fused = SimpleNamespace()
    assert the_record(current).decision is Decision.CONFLICT


@each_patch
def test_nothing_goes_in_over_code_that_was_not_read(
    rested: TwoModuleUpstream, session: SessionMaker, patch: Callable[[TwoModuleUpstream], None]
) -> None:
    original = rested.layers.double
    patch(rested)
    current = session(rested.overlay)
    current.arm()

    record = the_record(current)
    assert record.decision is Decision.CONFLICT
    assert "which this finding was read from" in record.reason
    assert record.around
    assert rested.layers.double is original


@each_patch
def test_a_later_patch_ends_the_overlay_in_the_next_audit(
    rested: TwoModuleUpstream, session: SessionMaker, patch: Callable[[TwoModuleUpstream], None]
) -> None:
    current = session(rested.overlay)
    current.arm()
    layers = rested.layers
    assert the_record(current).decision is Decision.ACTIVE
    patch(rested)

    assert current.audit_so_far().records[0].decision is Decision.CONFLICT  # ranks ask for this audit inside of hooks
    record = the_record(current)
    assert record.decision is Decision.CONFLICT
    assert "which this finding was read from" in record.reason
    assert layers.double(1) == 3  # upstream's own, over which nothing is corrected twice


def test_while_an_audit_takes_an_overlay_out_another_thread_waits(
    rested: TwoModuleUpstream, session: SessionMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Semaphore(0), threading.Event()
    take_out = install.take_out

    def slow(*args: Any) -> Any:
        entered.release()
        go_on.wait(HANG_S)
        return take_out(*args)

    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)  # undo refuses while another thread drops graphs
    current = session(rested.overlay)
    current.arm()
    layers = rested.layers
    replace_in(rested.helpers, "half", foreign)
    monkeypatch.setattr(install, "take_out", slow)
    threads = [threading.Thread(target=each) for each in (current.audit, current.undo)]
    for each in threads:
        each.start()
        if each is threads[0]:
            assert entered.acquire(timeout=HANG_S)

    has_waited = not entered.acquire(timeout=1)  # ten times as long as the wait for a lock that no thread seems to hold
    go_on.set()
    for each in threads:
        each.join(HANG_S)
    assert has_waited
    assert the_record(current).decision is Decision.DISABLED
    assert layers.double(1) == 3


@each_patch
def test_a_patch_before_the_first_call_is_seen_by_that_call(
    rested: TwoModuleUpstream, session: SessionMaker, patch: Callable[[TwoModuleUpstream], None]
) -> None:
    current = session(rested.overlay)
    current.arm()
    layers = rested.layers
    held = layers.double
    patch(rested)

    assert held(1) == layers.double(1) == 3
    assert current.audit_so_far().records[0].decision is Decision.CONFLICT


def test_names_that_a_witness_replaces_for_a_while_are_upstream_s_own(
    rested: TwoModuleUpstream, session: SessionMaker
) -> None:
    current = session(rested.overlay)
    current.arm()
    half, helpers = rested.helpers.half, rested.helpers
    rested.layers.half = helpers.half = answer(foreign, half)
    helpers.Router.name = staticmethod(answer(foreign, answer(foreign, helpers.Router.name)))

    assert the_record(current).decision is Decision.ACTIVE
    assert rested.layers.double(1) == 2

    helpers.half = answer(half, foreign)  # a witness wraps the function that another library has put in
    assert the_record(current).decision is Decision.CONFLICT


def test_calls_of_a_witness_are_no_first_call(rested: TwoModuleUpstream, session: SessionMaker) -> None:
    """It has its own in the place of upstream's code, and takes it away again."""
    current = session(rested.overlay)
    current.arm()
    layers, half = rested.layers, rested.helpers.half
    with calls.not_counted():
        rested.helpers.half = foreign
        assert layers.double(1) == 2
        rested.helpers.half = half

    assert the_record(current).decision is Decision.ACTIVE
    rested.helpers.half = foreign
    assert layers.double(1) == 3


def test_in_strict_mode_the_first_call_raises(rested: TwoModuleUpstream, session: SessionMaker) -> None:
    current = session(rested.overlay, mode=Mode.STRICT)
    current.arm()
    rested.layers  # noqa: B018 - imported
    rested.helpers.half = foreign

    with pytest.raises(ActivationError, match="which this finding was read from"):
        rested.layers.double(1)


def test_a_name_that_upstream_defines_only_with_an_optional_import_may_be_missing(
    rested: TwoModuleUpstream, session: SessionMaker
) -> None:
    guarded = "try:\n    import no_such_kernels\n" + "".join(f"    {line}\n" for line in HELPERS.splitlines())
    rested.upstream.write(f"{guarded}except ImportError:\n    pass\n", module="helpers")
    rested.upstream.write(BROKEN_TEXT)
    current = session(rested.overlay)
    current.arm()

    assert not hasattr(rested.helpers, "half")
    assert rested.layers.double(1) == 2
    assert the_record(current).decision is Decision.ACTIVE


def test_a_module_that_comes_later_is_held_against_the_finding_then(
    rested: TwoModuleUpstream, session: SessionMaker
) -> None:
    rested.upstream.write(BROKEN_TEXT)  # which does not import the helpers
    rested.overlay = rested.upstream.overlay(probe=rested.upstream.probe)
    other = rested.upstream.overlay(probe=lambda tree: _and_reads(rested, tree))
    current = session(other)
    current.arm()
    assert rested.layers.double(1) == 2
    assert the_record(current).decision is Decision.ACTIVE

    rested.helpers.Router.route = foreign
    assert the_record(current).decision is Decision.CONFLICT


def _and_reads(rested: TwoModuleUpstream, tree: SourceTree) -> Finding:
    helpers = tree.module(f"{rested.upstream.name}.helpers")
    assert helpers is not None
    helpers.function("Router.route")
    return rested.upstream.probe(tree)


def test_armed_again_it_goes_in_where_upstreams_own_is_back(rested: TwoModuleUpstream, session: SessionMaker) -> None:
    current = session(rested.overlay)
    current.arm()
    layers, half = rested.layers, rested.helpers.half
    rested.helpers.half = foreign
    assert the_record(current).decision is Decision.CONFLICT
    current.arm()
    assert the_record(current).decision is Decision.CONFLICT

    rested.helpers.half = half
    current.arm()
    assert the_record(current).decision is Decision.ACTIVE
    assert layers.double(1) == 2


@each_patch
def test_every_audit_compares_repairs_of_upstream(
    upstream: Upstream, session: SessionMaker, patch: Callable[[TwoModuleUpstream], None]
) -> None:
    rested = TwoModuleUpstream(upstream, FIXED_TEXT)
    current = session(rested.overlay)
    current.arm()
    rested.layers  # noqa: B018 - imported
    assert the_record(current).decision is Decision.RETIRED
    patch(rested)

    record = the_record(current)
    assert record.decision is Decision.CONFLICT
    assert record.around


def test_an_overlay_is_taken_out_with_the_repair_that_it_needs(
    rested: TwoModuleUpstream, session: SessionMaker
) -> None:
    rested.upstream.write("def wrap(x):\n    return round(x)\n", module="wrapper")
    dependent = rested.upstream.overlay(
        id="keep-bits",
        target=rested.overlay.target._replace(module=f"{rested.upstream.name}.wrapper", symbol="wrap"),
        probe=lambda _: Finding(verdict=Verdict.BROKEN, shape="rounds", evidence=(Evidence("rounds"),)),
        replacements={"rounds": (Replacement(symbol="wrap", make=lambda _original, _module: lambda x: x),)},
        witness=None,
        self_test=lambda module: Observation(broken=module.wrap(1.5) != 1.5, seen="it rounds"),
        needs=(rested.overlay.id,),
    )
    current = session(rested.overlay, dependent)
    current.arm()
    assert rested.layers is not rested.upstream.load("wrapper")
    assert {each.decision for each in current.audit().records} == {Decision.ACTIVE}

    rested.helpers.half = foreign
    assert {each.decision for each in current.audit().records} == {Decision.CONFLICT}
