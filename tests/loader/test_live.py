"""Comparison of loaded code with the source that was read: an overlay is retired only where they agree."""

from __future__ import annotations

import functools
import py_compile
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from made_up import BROKEN_TEXT, FIXED_TEXT, Upstream, gate_of

from megacpp_overlays.loader import live
from megacpp_overlays.loader.session import Session
from megacpp_overlays.model import Body, Decision, Evidence, Finding, Observation, Proof, Record, Verdict
from megacpp_overlays.source.trees import InstalledTree, SourceTree

SessionMaker = Callable[..., Session]

TEXT = '''
"""A repaired upstream in which bodies of every kind stand."""

from __future__ import annotations

import functools

from {package}.helpers import half, half as a_half

SCALE = 2


def logged(*words):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)
        return wrapper
    return decorate


class Kernel:
    def __init__(self, fn):
        self.fn = fn

    def __call__(self, *args):
        return self.fn(*args)


class Inside:
    def __init__(self, function):
        self.orig_func = function


class TwoObjects:
    """As TileLang's decorator makes them."""

    def __init__(self, function):
        self.func = Inside(function)


@TwoObjects
def compiled(x):
    return x + 2


class Base:
    def whole(self):
        return 1


class Layer(Base):
    """Bodies of a class."""

    def __init__(self, x: Unknown = 1):
        super().__init__()
        self.__hidden = [each for each in range(x) if each in {{1, 2}}]
        self.late = lambda y: (self.__hidden, -0.0, y)

    def forward(self, x):
        assert x is not None, "a number"
        return f"{{x!r:>10}}", __class__

    @staticmethod
    @logged("static")
    def static(x, scale=-2, *, names=("a", 0.0), width=SCALE, seen={{}}):
        return x

    @classmethod
    def build(cls, *, x=None):
        return cls(x)

    @property
    def size(self):
        return a_half(2)

    async def wait(self):
        async for each in self:
            yield each

    class Inner:
        def value(self):
            return 3


@Kernel
def kernel(x):
    return x + 1


@functools.lru_cache(maxsize=None)
@logged("kept")
def kept(x):
    """Twice."""
    return half(4 * x)
'''
SYMBOLS = (
    "Layer",
    "Layer.__init__",
    "Layer.forward",
    "Layer.static",
    "Layer.build",
    "Layer.size",
    "Layer.wait",
    "Layer.Inner.value",
    "kernel",
    "compiled",
    "kept",
    "half",
    "a_half",
    "",
)


@pytest.fixture
def repaired(upstream: Upstream) -> Upstream:
    upstream.write("def half(x):\n    return x // 2\n", module="helpers")
    upstream.write(TEXT.format(package=upstream.name))
    return upstream


def found(upstream: Upstream, *symbols: str) -> Finding:
    repair = tuple(Body(upstream.module_name, symbol) for symbol in symbols)
    seen = (Evidence(seen="as in 1.0"),)
    return Finding(verdict=Verdict.FIXED, shape=None, evidence=seen, repair=repair, proof=Proof.READ)


def differs(upstream: Upstream, *symbols: str) -> str | None:
    return live.difference(found(upstream, *symbols), InstalledTree())


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_code_that_was_loaded_from_the_text_that_was_read_does_not_differ(repaired: Upstream, symbol: str) -> None:
    repaired.load()

    assert differs(repaired, symbol) is None


def test_code_that_is_not_loaded_cannot_differ(repaired: Upstream) -> None:
    assert differs(repaired, "nowhere") is None


def _theirs(x: Any) -> Any:
    return x


def _subclassed(module: ModuleType) -> None:
    module.Layer = type("Layer", (module.Layer,), {"__module__": module.__name__})


REPLACED: dict[str, tuple[str, Callable[[ModuleType], object]]] = {
    "function": ("kept", lambda module: setattr(module, "kept", _theirs)),
    "wrapper": ("kept", lambda module: setattr(module, "kept", functools.wraps(module.kept)(lambda x: x))),
    "code": ("Layer.forward", lambda module: setattr(module.Layer.forward, "__code__", _of_one(module).__code__)),
    "method": ("Layer.forward", lambda module: setattr(module.Layer, "forward", _theirs)),
    "method of the class": ("Layer", lambda module: setattr(module.Layer, "forward", _theirs)),
    "method of the module": ("", lambda module: setattr(module.Layer, "forward", _theirs)),
    "method of an inner class": ("Layer", lambda module: setattr(module.Layer.Inner, "value", _theirs)),
    "static method": ("Layer.static", lambda module: setattr(module.Layer, "static", staticmethod(_theirs))),
    "property": ("Layer.size", lambda module: setattr(module.Layer, "size", property(_theirs))),
    "deleted method": ("Layer.forward", lambda module: delattr(module.Layer, "forward")),
    "class": ("Layer", lambda module: setattr(module, "Layer", module.Base)),
    "class under a method": ("Layer.forward", lambda module: setattr(module, "Layer", module.Base)),
    "subclass": ("Layer.forward", _subclassed),
    "subclass of the class": ("Layer", _subclassed),
    "deleted class": ("Layer", lambda module: delattr(module, "Layer")),
    "kernel": ("kernel", lambda module: setattr(module.kernel, "fn", _theirs)),
    "imported name": ("a_half", lambda module: setattr(module, "a_half", _theirs)),
    "built-in": ("kept", lambda module: setattr(module, "kept", abs)),
}


def _of_one(module: ModuleType) -> Any:
    """Return a method with a cell for its class, as `forward` has."""

    class Layer:
        def forward(self, x):  # type: ignore[no-untyped-def]
            return x, __class__

    return Layer.forward


@pytest.mark.parametrize(("symbol", "replace_it"), REPLACED.values(), ids=REPLACED)
def test_a_replaced_definition_is_named(
    repaired: Upstream, symbol: str, replace_it: Callable[[ModuleType], object]
) -> None:
    replace_it(repaired.load())

    assert "as it is loaded" in (differs(repaired, symbol) or "")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("in {1, 2}", "in {1, 3}"),
        ("-0.0", "0.0"),
        ("self.late", "self.late_"),
        ("is not None", "is None"),
        (':>10}"', ':>11}"'),
        ("cls(x)", "cls(x=x)"),
        ("range(x)", "range(0, x)"),
        ("from __future__ import annotations", ""),
    ],
)
def test_a_file_that_was_replaced_after_loading_is_not_the_running_code(repaired: Upstream, old: str, new: str) -> None:
    repaired.load()
    text = TEXT.format(package=repaired.name)
    assert old in text

    repaired.write(text.replace(old, new))

    assert "which is not the code that was read in" in (differs(repaired, "Layer") or "")


OTHER_DEFAULTS = {
    "another number": lambda function: setattr(function, "__defaults__", (2,)),
    "a number of another type": lambda function: setattr(function, "__defaults__", (-2.0,)),
    "one more": lambda function: setattr(function, "__defaults__", (-2, -2)),
    "none": lambda function: setattr(function, "__defaults__", None),
    "another by name": lambda function: function.__kwdefaults__.update(names=("a", -0.0)),
    "one more by name": lambda function: function.__kwdefaults__.update(x=1),
    "one fewer by name": lambda function: function.__kwdefaults__.pop("names"),
    "none by name": lambda function: setattr(function, "__kwdefaults__", None),
    "another kind of table": lambda function: function.__kwdefaults__.update(seen=[]),
}


@pytest.mark.parametrize("change", OTHER_DEFAULTS.values(), ids=OTHER_DEFAULTS)
def test_other_defaults_of_the_same_code_differ_from_the_source(
    repaired: Upstream, change: Callable[[Any], object]
) -> None:
    module = repaired.load()
    assert differs(repaired, "Layer.static") is None

    change(module.Layer.static.__wrapped__)

    assert "has other defaults than the text read in" in (differs(repaired, "Layer.static") or "")
    assert "Layer.static" in (differs(repaired, "Layer") or "")


def test_a_default_that_the_text_does_not_tell_may_be_any_value(repaired: Upstream) -> None:
    defaults = repaired.load().Layer.static.__wrapped__.__kwdefaults__

    defaults["seen"]["a call"] = 1
    defaults["width"] = 3

    assert differs(repaired, "Layer.static") is None


def test_the_same_text_in_another_file_is_foreign(repaired: Upstream) -> None:
    repaired.write(TEXT.format(package=repaired.name), module="copy")
    module, other = repaired.load(), repaired.load("copy")
    module.kept = other.kept

    assert ".copy.kept" in (differs(repaired, "kept") or "")


# The decision of the loader.


def settle(session: SessionMaker, upstream: Upstream, **changes: Any) -> Record:
    current = session(upstream.overlay(**changes))
    current.arm()
    upstream.load()
    return current.audit().records[0]


def test_a_repair_that_was_read_and_runs_is_retired_and_says_how_that_is_known(
    upstream: Upstream, session: SessionMaker
) -> None:
    upstream.write(FIXED_TEXT)

    record = settle(session, upstream)

    assert record.decision is Decision.RETIRED
    assert record.reason == "read: return x + x (layers.py:7)"


def test_a_repair_that_was_witnessed_says_so(upstream: Upstream, session: SessionMaker) -> None:
    def probe(tree: SourceTree) -> Finding:
        return replace(upstream.probe(tree), proof=Proof.WITNESSED)

    upstream.write(FIXED_TEXT)

    assert settle(session, upstream, probe=probe).reason.startswith("witnessed: ")


def test_the_broken_release_running_with_the_repaired_file_on_disk_is_a_conflict(
    upstream: Upstream, session: SessionMaker
) -> None:
    """The package was upgraded under a process that had imported it; then the session was armed."""
    upstream.write(BROKEN_TEXT)
    upstream.load()
    upstream.write(FIXED_TEXT)

    record = settle(session, upstream)

    assert (record.decision, record.verdict) == (Decision.CONFLICT, "FIXED")
    assert ".double as it is loaded is" in record.reason
    assert "not the code that was read in" in record.reason


def test_a_stale_bytecode_file_that_is_not_checked_is_a_conflict(upstream: Upstream, session: SessionMaker) -> None:
    upstream.write(BROKEN_TEXT)
    path = upstream.folder / upstream.name / "layers.py"
    py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    upstream.write(FIXED_TEXT)

    assert settle(session, upstream).decision is Decision.CONFLICT


def test_a_broken_class_put_into_the_repaired_module_is_a_conflict(upstream: Upstream, session: SessionMaker) -> None:
    upstream.write(BROKEN_TEXT)
    broken = upstream.load().double
    del sys.modules[upstream.module_name]
    upstream.write(FIXED_TEXT)
    upstream.load().double = broken

    assert settle(session, upstream).decision is Decision.CONFLICT


def test_a_witness_that_sees_the_defect_is_believed(upstream: Upstream, session: SessionMaker) -> None:
    upstream.write(FIXED_TEXT)

    record = settle(session, upstream, witness=lambda _: Observation(broken=True, seen="double(1) = 3"))

    assert record.decision is Decision.CONFLICT
    assert record.reason == "the probe says FIXED but the loaded code does not behave so: double(1) = 3"


def test_a_patch_after_the_decision_is_seen_by_a_deep_audit(upstream: Upstream, session: SessionMaker) -> None:
    upstream.write(FIXED_TEXT)
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()
    assert current.audit(deep=True).records[0].decision is Decision.RETIRED

    module.double = _theirs

    (record,) = current.audit(deep=True).records
    assert record.decision is Decision.CONFLICT
    assert "_theirs" in record.reason


def test_code_that_cannot_be_compared_is_a_conflict(upstream: Upstream, session: SessionMaker) -> None:
    def explode(_: ModuleType) -> Observation:
        raise ImportError("no such kernel")

    upstream.write(FIXED_TEXT)

    record = settle(session, upstream, witness=explode)

    assert record.decision is Decision.CONFLICT
    assert "could not be compared with the source that was read: ImportError: no such kernel" in record.reason


def test_an_overlay_that_is_off_asks_nothing(upstream: Upstream, session: SessionMaker) -> None:
    def explode(_: ModuleType) -> Observation:
        raise AssertionError("asked")

    upstream.write(FIXED_TEXT)
    current = session(upstream.overlay(witness=explode), disabled=frozenset({"double-fix"}))
    current.arm()
    upstream.load()

    assert current.audit().records[0].decision is Decision.DISABLED


def test_code_that_only_looks_repaired_is_a_conflict_with_the_command_to_prove_it(
    upstream: Upstream, session: SessionMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    def probe(_: SourceTree) -> Finding:
        return Finding(
            verdict=Verdict.UNRECOGNISED,
            shape=None,
            evidence=(Evidence(seen="x is added once"),),
            repair=(Body(upstream.module_name, "double"),),
            looks_repaired=True,
        )

    record = settle(session, upstream, probe=probe)

    assert record.decision is Decision.CONFLICT
    says = (
        "x is added once; it looks repaired, but this form is not on record; "
        "`megacpp-overlays witness double-fix` can prove it"
    )
    assert record.reason.startswith(says)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "conflict: " in line]
    assert says in line


def test_a_gate_is_compared_with_code_that_is_loaded_already(upstream: Upstream, session: SessionMaker) -> None:
    upstream.write(FIXED_TEXT)
    gate = gate_of(upstream, probe=lambda tree: upstream.probe(tree))
    upstream.load().double = _theirs

    armed = session(gate)
    armed.arm()

    (record,) = armed.audit().records
    assert record.decision is Decision.CONFLICT
    assert "double as it is loaded is" in record.reason
