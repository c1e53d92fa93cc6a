"""Drift of loaded modules: foreign objects are found and named, even under names of upstream's, and no object of upstream's is."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import wrapt
from made_up import BROKEN_TEXT, Upstream
from places import HANG_S, ROOT
from releases import only

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.loader.session import Session
from megacpp_overlays.upkeep.drift import substitutions
from megacpp_overlays.upkeep.drift.substitutions import ProcessDrift

UPSTREAM = '''
import abc
import contextlib
import dataclasses
import enum
import functools
import typing

try:
    import not_installed
    HAVE = True
except ImportError:
    HAVE = False


def logged(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper


def counted(function):
    def without_wraps(*args):
        return function(*args)
    return without_wraps


def plain(x):
    return x


@logged
def decorated(x):
    return x


@counted
def hidden(x):
    return x


@functools.lru_cache(maxsize=2)
def cached(x):
    return x


@contextlib.contextmanager
def managed():
    yield


@functools.singledispatch
def dispatched(x):
    return x


class Compiled:
    """A wrapper without a reference to its original function, as compiled code has none."""

    __slots__ = ("code",)

    def __init__(self, function):
        self.code = function.__code__

    def __call__(self, x):
        return x


@Compiled
def compiled(x):
    return x


def half_closed(function):
    def wrapper(*args):
        return function(*args) if args else later
    if HAVE:
        later = None
    return wrapper


@half_closed
def closed(x):
    return x


class Registry:
    def register(self, function):
        return function


class Written:
    """Its methods are text that the module runs in a namespace of their own, as handlers of Inductor are."""


_written = {}
exec("def twice(self, x):\\n    return 2 * x\\n", _written)
Written.twice = _written["twice"]


REGISTRY = {"all": Registry()}


@REGISTRY["all"].register
def registered(x):
    return x


try:
    import not_installed as fallback
except ImportError:
    def fallback(x):
        return x


if HAVE:
    from not_installed import fused
else:
    def fused(x):
        return x


def rebound(x):
    return x


rebound = functools.partial(rebound, 1)


def gone(x):
    return x


del gone

with contextlib.suppress(ValueError):
    def guarded(x):
        return x


class Stand:
    """A stand-in for a missing library."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return self


stand_in = Stand()


class Made(metaclass=stand_in):
    def run(self):
        return 1


class Layer:
    kind = "layer"

    def forward(self, x):
        return x

    def __private(self):
        return self

    @staticmethod
    @logged
    def static(x):
        return x

    @classmethod
    def build(cls):
        return cls()

    @property
    def size(self):
        return 1

    @size.setter
    def size(self, value):
        self.kept = value

    @functools.cached_property
    def slow(self):
        return 1

    class Inner:
        def run(self):
            return 1


class Child(Layer):
    pass


@dataclasses.dataclass(slots=True)
class Point:
    x: int = 0

    def norm(self):
        return self.x


class Colour(enum.Enum):
    RED = 1

    def name_of(self):
        return self.name


class Pair(typing.NamedTuple):
    left: int

    def total(self):
        return self.left


class Shape(typing.Protocol):
    @abc.abstractmethod
    def area(self) -> int: ...


for each in (1,):
    def in_a_loop(x):
        return x


square = lambda x: x * x
square.power = 2

if HAVE:
    def missing(x):
        return x
else:
    missing = None

if HAVE:
    class Branched:
        def run(self):
            return 1

        def only_here(self):
            return 1
else:
    class Branched:
        def run(self):
            return 2
'''
USER = """
from typing import TYPE_CHECKING

from . import layers
from .layers import Child, Layer as Base, plain, rebound, square, stand_in, decorated as wrapped, HAVE

try:
    from .layers import compiled
except ImportError:
    compiled = None

if TYPE_CHECKING:
    from .layers import Point

early = None
from .layers import cached as early_cached


def fill():
    global early_cached
    early_cached = 1
"""


@pytest.fixture
def module(upstream: Upstream) -> types.ModuleType:
    upstream.write(UPSTREAM)
    return upstream.load()


@pytest.fixture
def look(upstream: Upstream) -> Callable[[], ProcessDrift]:
    return lambda: substitutions.look([upstream.name])


def owners(found: ProcessDrift) -> Mapping[str, str]:
    return {each.symbol: each.by for each in found.replaced}


def theirs(*args: Any) -> Any:
    """Return the arguments, as a stand-in for a function of a third-party plugin."""
    return args


@pytest.mark.usefixtures("module")
def test_untouched_upstream_code_of_every_shape_is_its_own(look: Callable[[], ProcessDrift]) -> None:
    found = look()

    assert (found.replaced, found.unchecked) == ((), ())
    assert found.modules == 2  # the package and its module


def wraps(original: Any) -> Any:
    return functools.wraps(original)(lambda *args: original(*args))


def proxied(original: Any) -> Any:
    @wrapt.decorator
    def outside(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    return outside(original)


class Callee:
    def __call__(self, *args: Any) -> Any:
        return args


REPLACEMENTS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "function": (lambda _: theirs, "test_drift_substitutions.theirs"),
    "lambda": (lambda _: lambda x: x, "<lambda>"),
    "functools.wraps": (wraps, "test_drift_substitutions"),
    "partial": (lambda _: functools.partial(theirs, 1), "test_drift_substitutions.theirs"),
    "wrapt": (proxied, "a wrapper of wrapt around it: "),
    "built-in": (lambda _: abs, "builtins.abs"),
    "object": (lambda _: Callee(), "an object of"),
    "mock": (lambda original: mock.create_autospec(original), ""),
    "class": (lambda _: Callee, "Callee"),
}


SYMBOLS = ("plain", "decorated", "hidden", "managed", "guarded", "compiled", "closed", "square")


@pytest.mark.parametrize(
    ("symbol", "how"),
    only(
        itertools.product(SYMBOLS, REPLACEMENTS),
        [*itertools.product(SYMBOLS[:1], REPLACEMENTS), *itertools.product(SYMBOLS, [*REPLACEMENTS][:1])],
    ),
)
def test_a_replaced_function_names_who_replaced_it(
    module: types.ModuleType, look: Callable[[], ProcessDrift], symbol: str, how: str
) -> None:
    make, says = REPLACEMENTS[how]
    setattr(module, symbol, make(getattr(module, symbol)))

    found = owners(look())

    assert list(found) == [symbol]
    assert says in found[symbol]


def test_the_owner_is_the_file_and_line_of_the_foreign_code_not_the_name_it_borrowed(
    module: types.ModuleType, look: Callable[[], ProcessDrift]
) -> None:
    module.plain = wraps(module.plain)  # type: ignore[attr-defined]
    line = wraps.__code__.co_firstlineno + 1

    (by,) = owners(look()).values()

    assert module.plain.__module__ == module.__name__
    assert by.endswith(f"({__file__}:{line})")
    assert module.__name__ not in by


@pytest.mark.parametrize(
    ("symbol", "make"),
    [
        ("forward", wraps),
        ("forward", lambda _: theirs),
        ("_Layer__private", lambda _: theirs),
        ("static", lambda _: staticmethod(theirs)),
        ("static", lambda original: staticmethod(wraps(original.__func__))),
        ("build", lambda _: classmethod(theirs)),
        ("size", lambda _: property(theirs)),
        ("size", lambda original: property(original.fget, theirs)),
        ("slow", lambda _: functools.cached_property(theirs)),
    ],
    ids=[
        *("wrapped method", "method", "private method", "static method", "wrapped static method"),
        *("class method", "getter", "setter", "cached property"),
    ],
)
def test_replaced_methods_of_every_kind_are_found(
    module: types.ModuleType, look: Callable[[], ProcessDrift], symbol: str, make: Callable[[Any], Any]
) -> None:
    setattr(module.Layer, symbol, make(vars(module.Layer)[symbol]))

    assert set(owners(look())) == {f"Layer.{symbol}"}


def test_nested_generated_and_branching_classes_are_looked_into(
    module: types.ModuleType, look: Callable[[], ProcessDrift]
) -> None:
    module.Layer.Inner.run = theirs
    module.Point.norm = theirs
    module.Colour.name_of = theirs
    module.Pair.total = theirs
    module.Branched.run = theirs

    assert set(owners(look())) == {"Layer.Inner.run", "Point.norm", "Colour.name_of", "Pair.total", "Branched.run"}


@pytest.mark.parametrize(
    "make",
    [lambda: theirs, lambda: functools.partial(theirs, 1), Callee, lambda: functools.partialmethod(theirs)],
    ids=["function", "partial", "object", "partialmethod"],
)
def test_a_function_over_an_inherited_method_is_found_and_data_is_not(
    module: types.ModuleType, look: Callable[[], ProcessDrift], make: Callable[[], Any]
) -> None:
    module.Child.forward = make()
    module.Child.kind = "other"

    assert set(owners(look())) == {"Child.forward"}


# Names that a module imports


@pytest.fixture
def user(upstream: Upstream, module: types.ModuleType) -> types.ModuleType:
    """A module that imports names of the other one."""
    assert module.__name__ == upstream.module_name
    upstream.write(USER, module="user")
    return upstream.load("user")


NAMES = ("plain", "wrapped", "Base", "rebound", "square", "stand_in", "compiled")
WAYS = sorted(REPLACEMENTS.keys() - {"built-in", "mock"})


@pytest.mark.parametrize(
    ("name", "how"),
    only(itertools.product(NAMES, WAYS), [*itertools.product(NAMES[:1], WAYS), *itertools.product(NAMES, WAYS[:1])]),
)
def test_an_imported_name_that_leads_elsewhere_is_found(
    user: types.ModuleType, look: Callable[[], ProcessDrift], name: str, how: str
) -> None:
    assert (look().replaced, look().unchecked) == ((), ())
    make, says = REPLACEMENTS[how]
    setattr(user, name, make(getattr(user, name)))

    (found,) = look().replaced

    assert (found.module, found.symbol, found.overlay) == (user.__name__, name, None)
    assert says in found.by


@pytest.mark.usefixtures("user")
def test_a_replacement_in_the_defining_module_is_named_there_alone(
    module: types.ModuleType, look: Callable[[], ProcessDrift]
) -> None:
    for name in ("plain", "decorated", "Child", "square"):
        setattr(module, name, theirs)

    found = look()

    assert {(each.module, each.symbol) for each in found.replaced} == {
        (module.__name__, name) for name in ("plain", "decorated", "Child", "square")
    }
    assert found.unchecked == ()


def test_names_that_change_by_themselves_are_passed_by(
    upstream: Upstream, user: types.ModuleType, look: Callable[[], ProcessDrift]
) -> None:
    user.fill()
    user.HAVE = True  # data
    user.compiled = None  # as where it cannot be imported
    upstream.write(
        """
        from .made import lazy
        from .making import group
        from . import making
        from .functions import same
        """,
        module="late",
    )
    upstream.write("def __getattr__(name):\n    return abs\n", module="made")
    upstream.write(
        "group = abs\ndef start():\n    global group\n    group = max\n",
        module="making",
    )
    upstream.write("def same(x):\n    return x\n", module="functions")
    late = upstream.load("late")
    late.making.start()

    assert look().replaced == ()


def test_a_module_and_a_function_of_one_name_are_not_distinguished(
    upstream: Upstream, look: Callable[[], ProcessDrift]
) -> None:
    upstream.write("def start(x):\n    return x\n", module="start")
    upstream.write("from . import start", module="early")
    upstream.load("early")
    (upstream.folder / upstream.name / "__init__.py").write_text("from .start import start\n")
    package = importlib.reload(sys.modules[upstream.name])
    assert type(package.start) is types.FunctionType

    assert look().replaced == ()
    package.start = sys.modules[f"{upstream.name}.start"]  # type: ignore[attr-defined]
    assert look().replaced == ()


def test_a_name_is_found_wherever_it_is_bound(
    upstream: Upstream, module: types.ModuleType, look: Callable[[], ProcessDrift]
) -> None:
    upstream.write("from .layers import plain\n", module="between")
    upstream.write("from .between import plain", module="far")
    between, far = upstream.load("between"), upstream.load("far")

    between.plain = theirs  # type: ignore[attr-defined]
    assert [(each.module, each.symbol) for each in look().replaced] == [(between.__name__, "plain")]
    far.plain = wraps(module.plain)  # type: ignore[attr-defined]
    assert [(each.module, each.symbol) for each in look().replaced] == [
        (between.__name__, "plain"),
        (far.__name__, "plain"),
    ]


def test_names_that_overlays_rebound_are_ours(
    upstream: Upstream, session: Callable[..., Session], look: Callable[[], ProcessDrift]
) -> None:
    upstream.write(BROKEN_TEXT)
    upstream.write("from .layers import double", module="user")
    user = upstream.load("user")
    before = user.double
    session(upstream.overlay()).arm()

    assert user.double is not before
    found = {(each.module, each.symbol, each.overlay) for each in look().replaced}
    assert found == {(name, "double", "double-fix") for name in (upstream.module_name, user.__name__)}
    user.double = before  # upstream's own
    assert [(each.module, each.overlay) for each in look().replaced] == [(upstream.module_name, "double-fix")]


def test_a_wrapper_of_a_library_may_come_by_way_of_another_module_of_the_package(
    upstream: Upstream, look: Callable[[], ProcessDrift]
) -> None:
    upstream.write(
        "import wrapt\n\n@wrapt.decorator\ndef traced(f, _, a, k):\n    return f(*a, **k)\n", module="tracing"
    )
    upstream.write("from .tracing import traced\n\n@traced\ndef step(x):\n    return x\n", module="steps")
    upstream.write("from .steps import step\n", module="loop")
    steps = upstream.load("steps")
    upstream.load("loop")
    assert (look().replaced, look().unchecked) == ((), ())

    steps.step = proxied(steps.step)  # type: ignore[attr-defined]

    assert "a wrapper of wrapt around it: " in owners(look())["step"]


def test_changes_within_the_package_and_its_libraries_are_not_seen(
    module: types.ModuleType, user: types.ModuleType, look: Callable[[], ProcessDrift]
) -> None:
    module.plain = module.cached  # type: ignore[attr-defined]
    module.decorated = module.logged(module.decorated)  # type: ignore[attr-defined]
    user.plain = max
    del module.guarded
    del module.Layer.forward

    assert (look().replaced, look().unchecked) == ((), ())


def test_code_that_was_compiled_into_the_module_itself_is_found(
    module: types.ModuleType, look: Callable[[], ProcessDrift]
) -> None:
    exec("def plain(x):\n    return x + 1\n", vars(module))

    assert owners(look())["plain"].endswith(".plain (<string>:1)")


@pytest.mark.parametrize("name", ["plain", "Registry.register"])
def test_code_of_no_module_in_the_place_of_a_definition_is_found_where_the_module_runs_text_too(
    module: types.ModuleType, look: Callable[[], ProcessDrift], name: str
) -> None:
    made: dict[str, Any] = {}
    exec("def other(*args):\n    return args\n", made)
    owner, _, symbol = name.rpartition(".")
    setattr(getattr(module, owner) if owner else module, symbol, made["other"])

    assert owners(look())[name] == "None.other (<string>:1)"


# Whole modules


def fake(name: str, **attributes: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(attributes)
    return made


STAND_INS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "a module of no file": (fake, "the module NAME (of no file)"),
    "a module of another file": (lambda name: fake(name, __file__=__file__), f"the module NAME ({__file__})"),
    "another module": (lambda _: functools, "the module functools ("),
    "a namespace": (lambda _: types.SimpleNamespace(plain=theirs), "an object of types.SimpleNamespace"),
    "an object without attributes": (lambda _: object(), "an object of builtins.object"),
    "nothing": (lambda _: None, "None: its import fails"),
}


@pytest.mark.parametrize("how", list(STAND_INS))
@pytest.mark.parametrize("of_package", [False, True], ids=["module", "package"])
def test_a_module_that_was_swapped_is_found(
    upstream: Upstream,
    module: types.ModuleType,
    look: Callable[[], ProcessDrift],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    of_package: bool,
) -> None:
    make, says = STAND_INS[how]
    name = upstream.name if of_package else module.__name__
    monkeypatch.setitem(sys.modules, name, make(name))

    found = [each for each in look().replaced if each.symbol == substitutions.ITSELF]

    assert [each.module for each in found] == [name]
    assert says.replace("NAME", name) in found[0].by


def test_a_module_that_puts_something_else_in_its_own_place_is_upstreams(
    upstream: Upstream, look: Callable[[], ProcessDrift]
) -> None:
    upstream.write("import sys, types\nsys.modules[__name__] = types.SimpleNamespace(x=1)\n", module="own")
    upstream.load("own")

    assert look().replaced == ()


def test_a_package_that_was_found_on_another_path_is_the_one_that_was_imported(
    upstream: Upstream,
    module: types.ModuleType,
    look: Callable[[], ProcessDrift],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = tmp_path_factory.mktemp("other") / upstream.name
    other.mkdir()
    (other / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(other.parent)

    assert look().replaced == ()
    assert module.__name__ in sys.modules


def test_a_swapped_module_whose_source_cannot_be_read_is_found_too(
    upstream: Upstream, module: types.ModuleType, look: Callable[[], ProcessDrift], monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream.write("def (\n")
    monkeypatch.setitem(sys.modules, module.__name__, fake(module.__name__))

    assert [each.symbol for each in look().replaced] == [substitutions.ITSELF]


def test_a_replaced_class_is_one_finding(module: types.ModuleType, look: Callable[[], ProcessDrift]) -> None:
    class Other(module.Layer):  # type: ignore[name-defined,misc]
        def forward(self, x: Any) -> Any:
            return x

    module.Layer = Other  # type: ignore[attr-defined]
    module.Point = Callee  # type: ignore[attr-defined]

    found = owners(look())

    assert set(found) == {"Layer", "Point"}
    assert "Other" in found["Layer"]
    assert f"({__file__}:" in found["Layer"]


def test_seams_of_ours_are_tracked_and_wrappers_around_them_are_not(
    upstream: Upstream, session: Callable[..., Session], look: Callable[[], ProcessDrift]
) -> None:
    upstream.write(BROKEN_TEXT)
    session(upstream.overlay()).arm()
    module = upstream.load()

    alone = look()
    assert [(each.symbol, each.overlay) for each in alone.replaced] == [("double", "double-fix")]
    assert "made_up" in alone.replaced[0].by
    assert substitutions.replaced([upstream.name]) == ()

    module.double = wraps(module.double)  # type: ignore[attr-defined]
    assert [(each.symbol, each.overlay) for each in look().replaced] == [("double", None)]
    assert [each.symbol for each in substitutions.replaced([upstream.name])] == ["double"]


def test_a_seam_over_an_inherited_method_is_ours(
    upstream: Upstream, session: Callable[..., Session], look: Callable[[], ProcessDrift]
) -> None:
    from megacpp_overlays.loader import seams

    upstream.write(BROKEN_TEXT)
    module = upstream.load()
    seams.replace(module.Child, "forward", lambda original: lambda self, x: original(self, x), overlay_id="child-fix")

    assert [(each.symbol, each.overlay) for each in look().replaced] == [("Child.forward", "child-fix")]


def test_a_file_that_was_edited_under_the_process_cannot_be_compared(
    upstream: Upstream, look: Callable[[], ProcessDrift]
) -> None:
    upstream.write(BROKEN_TEXT)
    upstream.load()
    upstream.write("\n\n" + BROKEN_TEXT)

    found = look()

    assert found.replaced == ()
    assert "layers.py was edited since it was imported" in found.unchecked[0]


def test_modules_and_objects_that_cannot_be_read_are_named(
    upstream: Upstream, module: types.ModuleType, look: Callable[[], ProcessDrift]
) -> None:
    class Shy:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("do not look at me")

        def __call__(self) -> None: ...

    module.decorated = Shy()  # type: ignore[attr-defined]
    Shy.__module__ = module.__name__
    upstream.write("x = 1\n", module="broken")
    upstream.load("broken")
    upstream.write("def (\n", module="broken")

    found = look()

    assert any("broken.py:1: cannot be parsed" in why for why in found.unchecked)
    assert any("RuntimeError: do not look at me" in why for why in found.unchecked)


def test_modules_without_source_and_lazy_ones_are_passed_by(
    upstream: Upstream, module: types.ModuleType, look: Callable[[], ProcessDrift], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was asked for")

    monkeypatch.setitem(sys.modules, f"{upstream.name}.lazy", Lazy(f"{upstream.name}.lazy"))
    monkeypatch.setitem(sys.modules, f"{upstream.name}.none", None)  # type: ignore[arg-type]
    module.stand_in = Lazy("stand_in")  # type: ignore[attr-defined]

    assert look().modules == 2


def test_without_names_the_packages_of_the_targets_are_looked_at(
    upstream: Upstream, session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = session(upstream.overlay())
    monkeypatch.setattr("megacpp_overlays.loader.session.current", lambda: made)
    upstream.load().Layer.forward = theirs

    assert [each.symbol for each in substitutions.replaced()] == ["Layer.forward"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise OSError('libcuda.so.1: cannot open')", "OSError: libcuda.so.1: cannot open$"),
        ("import sys\nsys.exit('usage: launcher')", "SystemExit: usage: launcher$"),
        ("import not_installed_at_all", "No module named 'not_installed_at_all'; put its folder on PYTHONPATH"),
    ],
)
def test_a_module_that_cannot_be_imported_is_an_error_with_its_reason(
    upstream: Upstream, tmp_path: Path, text: str, says: str
) -> None:
    upstream.write(text, module="plugin")

    with pytest.raises(UpkeepError, match=f"--import {upstream.name}.plugin: .*{says}"):
        substitutions.bring_in([f"{upstream.name}.layers", f"{upstream.name}.plugin"])


def test_looking_imports_nothing_and_touches_no_device(run_python: Callable[..., Any]) -> None:
    run_python(
        "import sys, megacpp_overlays\n"
        "from megacpp_overlays.upkeep.drift import substitutions\n"
        "assert substitutions.replaced() == ()\n"
        "loaded = {'torch', 'megatron', 'liger_kernel', 'triton'} & set(sys.modules)\n"
        "assert not loaded, loaded",
        Path(substitutions.__file__).parents[2],
        MEGACPP_OVERLAYS_LOG="logging",
    )


@pytest.mark.upstream
@pytest.mark.parametrize(
    ("python", "ours"),
    [
        (
            ROOT / ".venv/bin/python",
            {"liger-flce-none-backward", "liger-flce-frozen-states", "liger-flce-strided-gradients"},
        ),
        pytest.param(
            ROOT / ".envs/edge/bin/python",
            {"liger-flce-frozen-states", "loss-parallel-log-softmax"},
            marks=pytest.mark.full,
        ),
    ],
    ids=["current", "edge"],
)
def test_the_loaded_modules_of_a_release_hold_no_foreign_code_except_our_own_replacement(
    python: Path, ours: set[str]
) -> None:
    assert python.exists(), f"there is no {python}: run `make setup`"
    code = (
        "import functools, megacpp_overlays\n"
        "import liger_kernel.ops.fused_linear_cross_entropy, liger_kernel.transformers.rms_norm as target\n"
        "from megacpp_overlays.upkeep.drift import substitutions\n"
        "found = substitutions.look()\n"
        "assert [each for each in found.replaced if each.overlay is None] == [], found\n"
        f"assert {{each.overlay for each in found.replaced}} == {ours}, found\n"
        "assert found.modules > 50 and found.unchecked == (), found\n"
        "cls = target.LigerRMSNorm\n"
        "cls.forward = functools.wraps(cls.forward)(lambda self, x: x)\n"
        "(one,) = substitutions.replaced()\n"
        "print(one.symbol, one.by)\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()"
    )
    env = {**os.environ, "MEGACPP_OVERLAYS_LOG": "logging"}

    done = subprocess.run([python, "-c", code], env=env, capture_output=True, text=True, check=False, timeout=HANG_S)

    assert (done.returncode, done.stdout) == (0, "LigerRMSNorm.forward __main__.<lambda> (<string>:9)\n"), done.stderr
