"""Stale names are found by identity and rebound; a holder that cannot be rebound is named."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from types import CellType, FunctionType, ModuleType
from typing import Any

import pytest
from made_up import BROKEN_TEXT, Upstream

from megacpp_overlays.loader import aliases, live_names, seams
from megacpp_overlays.loader.heap import HeapSnapshot
from megacpp_overlays.loader.session import Session
from megacpp_overlays.model import Decision, Evidence, Finding, Replacement, Target, Verdict
from megacpp_overlays.source.trees import SourceTree


def put(module: ModuleType, symbol: str) -> seams.Seam:
    return seams.replace(
        *live_names.resolve(module, symbol), lambda original: lambda *a: original(*a), overlay_id="double-fix"
    )


def rebound(placed: list[seams.Seam], *, deep: bool) -> list[seams.Seam]:
    changed: list[seams.Seam] = []
    aliases.rebind(placed, changed, deep=deep)
    return changed


def test_names_that_were_imported_earlier_are_led_to_the_seam_even_if_renamed(upstream: Upstream) -> None:
    upstream.write("from .layers import double\n", module="user")
    upstream.write("from .layers import double as twice\n", module="renamer")
    module, user, renamer = upstream.load(), upstream.load("user"), upstream.load("renamer")
    original = module.double

    changed = rebound([put(module, "double")], deep=False)

    assert user.double is renamer.twice is module.double is not original
    assert sorted(map(str, changed)) == [f"{upstream.name}.renamer.twice", f"{upstream.name}.user.double"]
    assert all(seam.undo() for seam in changed)
    assert user.double is renamer.twice is original


def test_a_function_that_a_class_borrowed_is_rebound_too(upstream: Upstream) -> None:
    upstream.write("from . import layers\nclass Borrower:\n    run = layers.Layer.static\n", module="user")
    module, user = upstream.load(), upstream.load("user")

    changed = rebound([put(module, "Layer.static")], deep=True)

    assert [str(seam) for seam in changed] == [f"{upstream.name}.user.Borrower.run"]
    assert user.Borrower.run is module.Layer.static


def test_a_borrowed_descriptor_stays_a_descriptor(upstream: Upstream) -> None:
    upstream.write("from . import layers\nclass B:\n    run = vars(layers.Layer)['static']\n", module="user")
    module, user = upstream.load(), upstream.load("user")

    rebound([put(module, "Layer.static")], deep=True)

    assert vars(user.B)["run"] is vars(module.Layer)["static"]
    assert user.B().run(1) == 2


def test_another_function_of_the_same_name_is_left_alone(upstream: Upstream) -> None:
    upstream.write("def double(x): return 0\n", module="user")
    module, user = upstream.load(), upstream.load("user")

    assert rebound([put(module, "double")], deep=False) == []
    assert user.double(1) == 0


def test_a_seam_that_was_only_put_in_has_no_holders(upstream: Upstream) -> None:
    seam = put(upstream.load(), "double")

    assert aliases.holders([seam]) == []


def test_holders_that_cannot_be_rebound_are_described(upstream: Upstream) -> None:
    module = upstream.load()

    def user(function: object = module.double) -> object:
        return function

    def capture(function: object) -> object:
        return lambda: function

    class Block:
        def __init__(self, function: object) -> None:
            self.function = function

    kept = [functools.partial(module.double, 1), {"double": module.double, "other": 1}, capture(module.double)]
    block = Block(module.double)
    bound = module.Layer().forward

    words = aliases.holders([put(module, "double")])

    on_an_instance = words.pop()  # since Python 3.11 the instance itself holds it, before that its dictionary
    assert on_an_instance in {f"an object of {__name__}.{Block.__qualname__}", "a dict of 1 items"}
    assert words == [
        "a closure",
        f"a default argument of {__name__}.{user.__qualname__}",
        "a dict of 2 items",
        "an object of functools.partial",
    ]
    assert aliases.holders([put(module, "Layer.forward")]) == ["a bound method of Layer"]
    del kept, block, bound


def test_the_cells_of_the_replacement_itself_do_not_count(upstream: Upstream) -> None:
    module = upstream.load()

    def make(original: Any) -> Any:
        def inner(x: int) -> int:
            return original(x)

        def recursive(x: int) -> int:
            return inner(x) if x else recursive(1)

        return recursive

    assert aliases.holders([seams.replace(module, "double", make, overlay_id="double-fix")]) == []


def test_a_replacement_with_an_empty_cell_is_no_trouble(upstream: Upstream) -> None:
    module = upstream.load()

    def make(original: Any) -> Any:
        def replacement(x: int) -> int:
            return original(x)

        return FunctionType(replacement.__code__, {}, closure=(CellType(),))

    assert aliases.holders([seams.replace(module, "double", make, overlay_id="double-fix")]) == []


@pytest.mark.parametrize("symbol", ["double", "Layer.forward", "Layer.static", "Layer.build", "Layer.size"])
def test_a_count_of_references_tells_whether_a_walk_is_needed(upstream: Upstream, symbol: str) -> None:
    live = live_names.resolve(upstream.load(), symbol)
    assert not aliases.is_held_elsewhere(live)

    held = live.function

    assert aliases.is_held_elsewhere(live)
    del held


# --- replacements made in the usual ways hold their originals themselves ---


def by_wraps(original: Any, _module: ModuleType) -> Any:
    @functools.wraps(original)
    def double(*args: Any) -> Any:
        return original(*args) - 1

    return double


def by_update_wrapper_around_another(original: Any, _module: ModuleType) -> Any:
    @functools.wraps(original)
    def inner(*args: Any) -> Any:
        return original(*args)

    return lambda *args: inner(*args) - 1


def by_default(original: Any, _module: ModuleType) -> Any:
    def double(x: Any, _original: Any = original) -> Any:
        return _original(x) - 1

    return double


def by_keyword_default(original: Any, _module: ModuleType) -> Any:
    def double(x: Any, *, _original: Any = original) -> Any:
        return _original(x) - 1

    return double


@pytest.mark.parametrize(
    "make", [by_wraps, by_update_wrapper_around_another, by_default, by_keyword_default], ids=lambda each: each.__name__
)
def test_an_original_that_the_replacement_itself_holds_is_no_conflict(
    upstream: Upstream, session: Callable[..., Session], make: Any
) -> None:
    module = upstream.load()  # before the seam is made: the heap is searched for holders of the original
    current = session(upstream.overlay(replacements={"off-by-one": (Replacement(symbol="double", make=make),)}))
    current.arm()

    (record,) = current.audit(deep=True).records
    assert record.decision is Decision.ACTIVE, record.reason
    assert module.double(1) == 2


def test_a_late_session_walks_over_the_heap_once_for_all_of_its_overlays(
    upstream: Upstream, session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    walks, walk = list[int](), gc.get_referrers

    def counted(*wanted: object) -> list[Any]:
        walks.append(len(wanted))
        return [each for each in walk(*wanted) if each is not wanted]

    monkeypatch.setattr(gc, "get_referrers", counted)
    overlays = []
    for number in range(6):
        name = f"layers{number}"
        upstream.write(BROKEN_TEXT, module=name)
        upstream.load(name)
        target = Target(distribution=upstream.name, module=f"{upstream.name}.{name}", symbol="double")
        probe = functools.partial(_broken, target.module)
        overlays.append(upstream.overlay(id=f"double-fix-{number + 1}", target=target, probe=probe))

    current = session(*overlays)
    current.arm()
    assert {each.decision for each in current.audit().records} == {Decision.ACTIVE}
    late = len(walks)
    current.undo()
    current.arm()

    assert {each.decision for each in current.audit().records} == {Decision.ACTIVE}
    assert late <= 1
    assert len(walks) - late <= 1


def test_imports_of_a_seam_and_references_taken_there_are_rebound(
    upstream: Upstream, session: Callable[..., Session]
) -> None:
    upstream.write("from .layers import double\n", module="user")

    def make(original: Callable[[int], int], _: ModuleType) -> Callable[[int], int]:
        upstream.load("user")
        return lambda x: original(x) - 1

    current = session(upstream.overlay(replacements={"off-by-one": (Replacement(symbol="double", make=make),)}))
    current.arm()
    module = upstream.load()

    assert upstream.load("user").double is module.double
    assert module.double(1) == 2


def test_a_snapshot_of_the_heap_has_the_references_of_a_later_module(upstream: Upstream) -> None:
    upstream.write("from . import layers\nclass Borrower:\n    run = layers.double\n", module="user")
    module = upstream.load()
    heap = HeapSnapshot(lambda: [module.double])
    assert heap.owners(module.double) == [module]

    user = upstream.load("user")

    assert sorted(map(id, heap.owners(module.double))) == sorted(map(id, (module, user.Borrower)))


def _broken(name: str, tree: SourceTree) -> Finding:
    source = tree.module(name)
    assert source is not None
    return Finding(verdict=Verdict.BROKEN, shape="off-by-one", evidence=(Evidence("adds one", file=source.path),))


def test_a_class_is_found_with_any_metaclass(upstream: Upstream) -> None:
    class Silent(type):
        def __subclasses__(cls) -> list[type]:
            raise AssertionError("asked for subclasses")

        def __getattribute__(cls, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    module = upstream.load()
    made = Silent("Borrower", (), {"run": module.double})
    also = Silent("Heir", (made,), {"walk": module.double})

    owners = HeapSnapshot(lambda: [module.double]).owners(module.double)
    assert sorted(map(id, owners)) == sorted(map(id, (module, made, also)))  # the collector's order is none


@pytest.mark.parametrize("name", ["early", "late"])
def test_a_module_that_takes_the_place_of_another_is_news(upstream: Upstream, name: str) -> None:
    module = upstream.load()
    for each in ("early", "late"):
        upstream.write("", module=each)
        upstream.load(each)
    heap = HeapSnapshot(lambda: [module.double])
    assert heap.owners(module.double) == [module]

    del sys.modules[f"{upstream.name}.{name}"]
    upstream.write("from . import layers\nclass Borrower:\n    run = layers.double\n", module="user")
    user = upstream.load("user")

    assert sorted(map(id, heap.owners(module.double))) == sorted(map(id, (module, user.Borrower)))
