"""`active` is true at every moment it is said: each audit looks the seams up in the live process."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import releases
import wrapt
from made_up import BROKEN_TEXT, Upstream

from megacpp_overlays.errors import ActivationError
from megacpp_overlays.loader import statement
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import Mode
from megacpp_overlays.model import Decision, Observation, Overlay, Record, Replacement
from megacpp_overlays.source.trees import InstalledTree

SessionMaker = Callable[..., Session]


def only(session: Session, *, deep: bool = False) -> Record:
    (record,) = session.audit(deep=deep).records
    return record


def on_the_class(upstream: Upstream) -> Overlay:
    """Return an overlay whose seam is a method: `Layer.forward` gives one less."""

    def make(original: Callable[..., Any], _: ModuleType) -> Callable[..., Any]:
        return lambda self, x: original(self, x) - 1

    def self_test(module: ModuleType) -> Observation:
        return Observation(broken=module.Layer().forward(1) != 3, seen="a layer of one")

    return upstream.overlay(
        replacements={"off-by-one": (Replacement(symbol="Layer.forward", make=make),)},
        witness=None,
        self_test=self_test,
    )


@pytest.fixture
def on_function(upstream: Upstream, session: SessionMaker) -> tuple[Session, ModuleType]:
    """Return a session with its seam in `double`, and the module."""
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()
    assert only(current).decision is Decision.ACTIVE
    return current, module


@pytest.fixture
def on_class(upstream: Upstream, session: SessionMaker) -> tuple[Session, ModuleType]:
    """Return a session with its seam in `Layer.forward`, and the module."""
    current = session(on_the_class(upstream))
    current.arm()
    module = upstream.load()
    assert only(current).decision is Decision.ACTIVE
    return current, module


def execute_past_every_hook(module: ModuleType) -> ModuleType:
    """Execute the file of a module as a third-party recipe does; return the module that it made."""
    spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = made
    spec.loader.exec_module(made)
    return made


def execute_in_place(module: ModuleType) -> None:
    assert module.__file__ is not None
    with open(module.__file__) as file:
        exec(compile(file.read(), module.__file__, "exec"), vars(module))


class InFront:
    """A finder that comes before ours and finds one module."""

    def __init__(self, module: ModuleType) -> None:
        self.name, self.file = module.__name__, module.__file__

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        return importlib.util.spec_from_file_location(name, self.file) if name == self.name else None


# Replaced after us.


@pytest.mark.parametrize("strict", [False, True])
def test_a_class_that_was_replaced_as_a_whole_is_named(upstream: Upstream, session: SessionMaker, strict: bool) -> None:
    current = session(on_the_class(upstream), mode=Mode.STRICT if strict else Mode.AUTO)
    current.arm()
    module = upstream.load()

    class Fast:
        def forward(self, x: int) -> int:
            return x

    module.Layer = Fast

    audit = current.audit()
    assert audit.records[0].decision is Decision.CONFLICT
    assert f"{upstream.module_name}.Layer.forward was replaced after us by" in audit.records[0].reason
    assert "Fast.forward (" in audit.records[0].reason
    if strict:
        with pytest.raises(ActivationError, match="was replaced after us"):
            audit.raise_if_strict()


def test_a_class_that_is_mocked_is_named_and_true_again_when_the_mock_ends(
    on_class: tuple[Session, ModuleType],
) -> None:
    current, module = on_class

    with mock.patch(f"{module.__name__}.Layer", autospec=True):
        assert only(current).decision is Decision.CONFLICT
        assert "Layer was replaced after us by an object of unittest.mock" in only(current).reason

    assert only(current).decision is Decision.ACTIVE


def test_a_module_that_something_took_the_place_of_is_named(on_function: tuple[Session, ModuleType]) -> None:
    current, module = on_function
    theirs = ModuleType(module.__name__)
    vars(theirs)["double"] = lambda x: 3
    sys.modules[module.__name__] = theirs

    assert only(current).decision is Decision.CONFLICT
    assert "double was replaced after us by" in only(current).reason


@pytest.mark.parametrize("thing", [SimpleNamespace(), object(), wrapt.ObjectProxy(SimpleNamespace())])
def test_something_that_is_no_module_in_its_place_is_named(
    on_function: tuple[Session, ModuleType], thing: object
) -> None:
    current, module = on_function
    sys.modules[module.__name__] = thing  # type: ignore[assignment]

    assert only(current).decision is Decision.CONFLICT


def test_a_proxy_that_leads_to_the_module_is_no_conflict(on_function: tuple[Session, ModuleType]) -> None:
    current, module = on_function
    theirs = ModuleType(module.__name__)
    vars(theirs).update(vars(module))
    sys.modules[module.__name__] = theirs

    assert only(current).decision is Decision.ACTIVE


def test_an_attribute_that_was_taken_away_is_named(on_function: tuple[Session, ModuleType]) -> None:
    current, module = on_function
    del module.double

    assert "double was taken away after us" in only(current).reason
    assert only(current).decision is Decision.CONFLICT


# Executed again, unheard.


def in_sys_modules(module: ModuleType) -> None:
    execute_past_every_hook(module)


def by_its_loader(module: ModuleType) -> None:
    assert module.__spec__ is not None
    assert module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)


def by_exec(module: ModuleType) -> None:
    execute_in_place(module)


def found_by_another_finder(module: ModuleType) -> None:
    finder: Any = InFront(module)
    sys.meta_path.insert(0, finder)
    try:
        importlib.reload(module)
    finally:
        sys.meta_path.remove(finder)


UNHEARD = (in_sys_modules, by_its_loader, by_exec, found_by_another_finder)


@pytest.mark.parametrize(
    ("again", "of_class"),
    releases.only(itertools.product(UNHEARD, [False, True]), [*itertools.product(UNHEARD, [False]), (by_exec, True)]),
)
def test_a_target_that_was_executed_again_unheard_is_named_and_armed_again(
    upstream: Upstream, session: SessionMaker, again: Callable[[ModuleType], None], of_class: bool
) -> None:
    current = session(on_the_class(upstream) if of_class else upstream.overlay())
    current.arm()
    module = upstream.load()
    before = current.audit().fingerprint

    again(module)

    def answer() -> bool:
        live = sys.modules[module.__name__]
        return live.Layer().forward(1) == 3 if of_class else live.double(1) == 2

    assert not answer()
    record = only(current)
    assert record.decision is Decision.CONFLICT
    assert "is upstream's own again" in record.reason
    assert current.audit().fingerprint != before

    current.arm()

    assert answer()
    assert only(current).decision is Decision.ACTIVE
    current.undo()
    assert not answer()
    assert only(current).decision is Decision.DISABLED


# Names that pass by a seam.


def test_a_name_that_was_bound_before_a_reload_is_named(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()
    upstream.write("from .layers import double as twice\n", module="user")
    user = upstream.load("user")

    importlib.reload(module)

    assert user.twice is not module.double
    assert only(current).decision is Decision.CONFLICT
    assert f"{upstream.name}.user.twice leads past the seam" in only(current).reason

    importlib.reload(user)

    assert only(current).decision is Decision.ACTIVE


def test_a_class_that_was_imported_before_a_reload_is_named(upstream: Upstream, session: SessionMaker) -> None:
    current = session(on_the_class(upstream))
    current.arm()
    module = upstream.load()
    upstream.write("from .layers import Layer\n", module="user")
    user = upstream.load("user")

    importlib.reload(module)

    assert f"{upstream.name}.user.Layer leads past the seam" in only(current).reason
    current.undo()
    assert (user.Layer().forward(1), module.Layer().forward(1)) == (4, 4)


def test_a_name_that_was_bound_while_undone_and_before_a_reload_is_named(
    on_function: tuple[Session, ModuleType], upstream: Upstream
) -> None:
    current, module = on_function
    current.undo()
    upstream.write("from .layers import double as twice\n", module="user")
    user = upstream.load("user")
    importlib.reload(module)

    current.arm()

    assert (module.double(1), user.twice(1)) == (2, 3)
    assert only(current).decision is Decision.CONFLICT
    assert f"{upstream.name}.user.twice leads past the seam" in only(current).reason


def test_names_of_any_execution_are_led_back_by_undo(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay())
    current.arm()
    first = upstream.load()
    upstream.write("from .layers import double as twice\n", module="user")
    user = upstream.load("user")
    del sys.modules[upstream.module_name]
    second = upstream.load()

    current.undo()

    assert (first.double(1), user.twice(1), second.double(1)) == (3, 3, 3)
    assert only(current).decision is Decision.DISABLED


def test_a_rebound_name_that_a_mock_has_put_back_is_named(upstream: Upstream, session: SessionMaker) -> None:
    upstream.write("from .layers import double as twice\n", module="user")
    user = upstream.load("user")
    original = user.twice
    current = session(upstream.overlay())
    current.arm()
    assert only(current).decision is Decision.ACTIVE

    user.twice = original  # as the end of a mock does that began before

    assert only(current).decision is Decision.CONFLICT
    assert f"{upstream.name}.user.twice leads to the original again" in only(current).reason


# Subclasses and wrappers.


def test_a_subclass_that_overrides_a_seam_without_using_it_is_named(
    on_class: tuple[Session, ModuleType],
) -> None:
    current, module = on_class

    class Other(module.Layer):  # type: ignore[name-defined, misc]
        def forward(self, x: int) -> int:
            return x

    record = only(current)
    assert record.decision is Decision.CONFLICT
    assert "Other.forward overrides" in record.reason
    del Other


def test_an_override_that_only_raises_is_no_conflict(on_class: tuple[Session, ModuleType]) -> None:
    current, module = on_class

    class Converted(module.Layer):  # type: ignore[misc, name-defined]
        """A class whose instances are made in another way."""

        def forward(self, x: Any) -> Any:
            raise RuntimeError(f"not called directly: {x}")

    assert only(current).decision is Decision.ACTIVE
    assert Converted.__name__


def test_an_override_may_call_up_through_a_class_between_that_does(on_class: tuple[Session, ModuleType]) -> None:
    current, module = on_class

    class Between(module.Layer):  # type: ignore[name-defined, misc]
        def forward(self, x: int) -> int:
            return int(super().forward(x))

    class Last(Between):
        def forward(self, x: int) -> int:
            return Between.forward(self, x)

    assert only(current).decision is Decision.ACTIVE
    Between.forward = lambda self, x: x  # type: ignore[method-assign, assignment, misc] # which then is asked itself
    assert "Between.forward overrides" in only(current).reason
    del Last


def test_the_class_of_a_seam_that_was_replaced_is_no_older_one(
    on_class: tuple[Session, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    current, module = on_class
    user = ModuleType("its_user")
    vars(user)["Layer"] = module.Layer
    monkeypatch.setitem(sys.modules, user.__name__, user)
    monkeypatch.setattr(module.Layer, "forward", lambda _self, x: x)

    reason = only(current).reason
    assert "was replaced after us by" in reason
    assert "its_user" not in reason


def test_a_subclass_in_the_place_of_the_class_is_looked_at(on_class: tuple[Session, ModuleType]) -> None:
    current, module = on_class
    module.Layer = type("Layer", (module.Layer,), {})
    assert only(current).decision is Decision.ACTIVE

    module.Layer = type("Layer", (module.Layer,), {"forward": lambda self, x: x})

    assert only(current).decision is Decision.CONFLICT


def test_a_base_that_comes_before_the_seam_is_an_override(on_class: tuple[Session, ModuleType]) -> None:
    current, module = on_class

    class Mixin:
        def forward(self, x: int) -> int:
            return x

    class Mixed(Mixin, module.Layer):  # type: ignore[name-defined, misc]
        pass

    assert "Mixed.forward overrides" in only(current).reason
    del Mixed


def test_a_subclass_that_calls_the_seam_is_reported_and_counted(on_class: tuple[Session, ModuleType]) -> None:
    current, module = on_class
    before = current.audit().fingerprint

    class Longer(module.Layer):  # type: ignore[name-defined, misc]
        def forward(self, x: int) -> int:
            return int(super().forward(x)) + 1

    record = only(current)
    assert record.decision is Decision.ACTIVE
    assert "Longer.forward extends" in record.reason
    assert current.audit().fingerprint != before
    del Longer


def test_upstreams_own_override_in_the_file_that_was_probed_is_no_news(
    upstream: Upstream, session: SessionMaker
) -> None:
    upstream.write(BROKEN_TEXT + "class Own(Layer):\n    def forward(self, x):\n        return x\n")
    current = session(on_the_class(upstream))
    current.arm()
    upstream.load()

    assert only(current).decision is Decision.ACTIVE
    assert only(current).around == ()


def test_a_wrapper_is_reported_and_changes_the_digest(
    on_function: tuple[Session, ModuleType],
) -> None:
    current, module = on_function
    before, said = current.audit().fingerprint, digest_of(current)

    module.double = functools.wraps(module.double)(lambda x, inner=module.double: inner(x))

    record = only(current)
    assert record.decision is Decision.ACTIVE
    assert "is wrapped by" in record.reason
    assert record.around == (
        f"{module.__name__}.double: {__name__}.test_a_wrapper_is_reported_and_changes_the_digest.<locals>.<lambda>"
        if sys.version_info >= (3, 11)
        else f"{module.__name__}.double: {__name__}.<lambda>",
    )
    assert current.audit().fingerprint != before
    assert digest_of(current) != said


def digest_of(session: Session) -> str:
    return statement.digest(statement.of(session.audit(), InstalledTree()))


def test_a_proxy_around_a_seam_is_named_by_its_behaviour(on_function: tuple[Session, ModuleType]) -> None:
    current, module = on_function

    def traced(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    module.double = wrapt.FunctionWrapper(module.double, traced)

    assert only(current).decision is Decision.ACTIVE
    assert "is wrapped by a wrapper with" in only(current).reason
    assert "traced (" in only(current).reason


def test_a_wrapper_that_raises_when_it_is_asked_is_a_conflict(on_function: tuple[Session, ModuleType]) -> None:
    current, module = on_function

    class Rude:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    module.double = Rude()

    assert only(current).decision is Decision.CONFLICT
    assert "an object of" in only(current).reason


# Holders that only a walk over the heap finds.


def test_a_holder_of_an_original_without_a_name_is_found_by_a_deep_audit(
    on_function: tuple[Session, ModuleType],
) -> None:
    current, module = on_function
    held = [module.double.__wrapped__]

    assert only(current).decision is Decision.ACTIVE
    record = only(current, deep=True)
    assert record.decision is Decision.CONFLICT
    assert "still held by a list of 1 items" in record.reason
    del held

    assert only(current, deep=True).decision is Decision.ACTIVE


def test_a_name_that_was_bound_to_an_original_later_is_found_by_the_walk(
    upstream: Upstream, on_function: tuple[Session, ModuleType]
) -> None:
    current, _ = on_function
    upstream.write("from .layers import double\noriginal = double.__wrapped__\n", module="user")
    upstream.load("user")

    assert f"{upstream.name}.user.original leads past the seam" in only(current, deep=True).reason


# Seams where none should be.


def test_a_seam_of_another_session_is_not_called_off(upstream: Upstream, session: SessionMaker) -> None:
    first, second = session(upstream.overlay()), session(upstream.overlay(), disabled=frozenset({"double-fix"}))
    first.arm()
    second.arm()
    module = upstream.load()

    assert module.double(1) == 2
    assert only(second).decision is Decision.CONFLICT
    assert "leads to a seam of this overlay, which is disabled here" in only(second).reason
