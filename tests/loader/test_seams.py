"""Seams: any kind of symbol is replaced, and exactly the original is put back."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import random
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import BROKEN_TEXT, Upstream

from megacpp_overlays.errors import SeamError
from megacpp_overlays.loader import live_names, seams
from megacpp_overlays.runtime import seam_marks


def plus_ten(original: Any) -> Any:
    def replacement(*args: Any) -> Any:
        result = original(*args)
        return (*result[:-1], result[-1] + 10) if isinstance(result, tuple) else result + 10

    return replacement


def put(module: ModuleType, symbol: str, make: Any = plus_ten, overlay_id: str = "double-fix") -> seams.Seam:
    return seams.replace(*live_names.resolve(module, symbol), make, overlay_id=overlay_id)


CALLS = {
    "double": lambda m: m.double(1),
    "Layer.forward": lambda m: m.Layer().forward(1),
    "Layer.static": lambda m: (m.Layer.static(1), m.Layer().static(1)),
    "Layer.build": lambda m: (m.Layer.build(1), m.Child.build(1)),
    "Layer.size": lambda m: m.Layer().size,
    "Child.forward": lambda m: m.Child().forward(1),
    "Child.static": lambda m: m.Child.static(1),
}


@pytest.mark.parametrize("symbol", CALLS)
def test_undo_returns_exactly_the_original(upstream: Upstream, symbol: str) -> None:
    module = upstream.load()
    owner, name = live_names.resolve(module, symbol)
    before = dict(vars(owner))
    answer = CALLS[symbol](module)

    seam = put(module, symbol)
    replaced = CALLS[symbol](module)
    assert seam.in_place
    assert seam.undo()

    assert replaced != answer
    assert CALLS[symbol](module) == answer
    assert dict(vars(owner)) == before
    assert vars(owner).get(name) is before.get(name)
    assert not seam.in_place


def test_class_methods_still_get_the_class_they_are_called_on(upstream: Upstream) -> None:
    module = upstream.load()
    put(module, "Layer.build")

    assert module.Child.build(1) == ("Child", 12)


def test_an_inherited_method_is_replaced_on_the_child_alone(upstream: Upstream) -> None:
    module = upstream.load()

    seam = put(module, "Child.forward")

    assert (module.Layer().forward(1), module.Child().forward(1)) == (4, 14)
    assert seam.undo()
    assert "forward" not in vars(module.Child)
    assert seam.undo()


def test_undoing_twice_is_undoing_once(upstream: Upstream) -> None:
    module = upstream.load()
    seam = put(module, "double")

    assert seam.undo()
    assert seam.undo()
    assert module.double(1) == 3


def test_a_third_party_patch_on_top_is_left_alone(upstream: Upstream) -> None:
    module = upstream.load()
    seam = put(module, "double")

    def theirs(x: int) -> int:
        return x

    module.double = theirs

    assert not seam.undo()
    assert module.double is theirs
    assert "theirs" in seam.taken_by()


def test_replacing_again_adopts_our_seam_and_keeps_the_first_original(upstream: Upstream) -> None:
    module = upstream.load()
    original = module.double
    put(module, "double")

    second = put(module, "double")

    assert module.double(1) == 13
    assert second.undo()
    assert module.double is original


def test_two_overlays_cannot_hold_the_same_attribute(upstream: Upstream) -> None:
    module = upstream.load()
    put(module, "double", overlay_id="first")

    with pytest.raises(SeamError, match="already held by overlay first"):
        put(module, "double", overlay_id="second")


def test_a_replacement_looks_like_the_original_and_pickles_by_reference(upstream: Upstream) -> None:
    module = upstream.load()
    original = module.double
    put(module, "double")

    assert module.double.__module__ == original.__module__
    assert module.double.__qualname__ == "double"
    assert module.double.__wrapped__ is original
    assert inspect.signature(module.double) == inspect.signature(original)
    assert inspect.isfunction(module.double)
    assert pickle.loads(pickle.dumps(module.double)) is module.double
    assert copy.deepcopy(module.double) is module.double


def test_a_property_keeps_its_setter_and_its_text(upstream: Upstream) -> None:
    module = upstream.load()
    kept: list[int] = []
    module.Layer.size = property(module.Layer.size.fget, lambda self, value: kept.append(value), None, "The size.")
    put(module, "Layer.size")

    layer = module.Layer()
    layer.size = 5

    assert (layer.size, kept, module.Layer.size.__doc__) == (11, [5], "The size.")


@pytest.mark.parametrize(
    ("symbol", "says"),
    [
        ("triple", "has no attribute triple"),
        ("Layer.missing", "has no attribute missing"),
        ("Missing.forward", "has no class Missing"),
        ("double.forward", "has no class double"),
        ("CALLS", "is no function"),
    ],
)
def test_a_symbol_that_cannot_be_replaced_is_refused_by_name(upstream: Upstream, symbol: str, says: str) -> None:
    with pytest.raises(SeamError, match=says):
        put(upstream.load(), symbol)


@pytest.mark.parametrize("kind", ["the original", "nothing", "a class", "another function of upstream"])
def test_a_replacement_that_is_not_new_is_refused_before_anything_changes(upstream: Upstream, kind: str) -> None:
    module = upstream.load()
    original, other = module.double, module.Layer.static
    made = {"the original": original, "nothing": None, "a class": module.Layer, "another function of upstream": other}

    with pytest.raises(SeamError, match="is no new function but"):
        put(module, "double", lambda _: made[kind])

    assert module.double is original
    assert not hasattr(other, "__wrapped__")


def test_undone_and_put_in_again_it_is_the_same_function(upstream: Upstream) -> None:
    module = upstream.load()
    first = put(module, "double")
    held = module.double
    first.undo()

    put(module, "double")

    assert module.double is held


def test_a_function_that_wraps_ours_does_not_pass_for_ours(upstream: Upstream) -> None:
    module = upstream.load()
    seam = put(module, "double")
    module.double = functools.wraps(module.double)(lambda x: 0)  # copies our mark with everything else

    assert seam_marks.mark_of(module.double) is None
    assert seam_marks.mark_behind(module.double) is seam_marks.mark_of(seam.replacement)
    assert not seam.undo()


def test_an_owner_that_does_not_let_go_is_refused() -> None:
    with pytest.raises(SeamError, match="cannot be replaced"):
        seams.replace(str, "upper", plus_ten, overlay_id="double-fix")


def test_a_mark_of_another_copy_of_the_loader_is_recognised(upstream: Upstream) -> None:
    def theirs(x: int) -> int:
        return x

    class Mark:
        overlay_id, original, inherited, made = "double-fix", upstream.load().double, False, staticmethod(theirs)

    theirs.__megacpp_seam__ = Mark()  # type: ignore[attr-defined]

    assert seam_marks.mark_of(theirs) is not None
    assert seam_marks.mark_of(upstream.load().double) is None
    assert seam_marks.mark_of(5) is None


@given(st.lists(st.sampled_from(["Layer.forward", "Layer.static", "double"]), max_size=12), st.randoms())
def test_any_order_of_replacing_and_undoing_ends_at_the_original(symbols: list[str], order: random.Random) -> None:
    module = ModuleType("made_up_layers")
    exec(compile(BROKEN_TEXT, "made_up_layers.py", "exec"), vars(module))
    before = (vars(module.Layer)["forward"], vars(module.Layer)["static"], module.double)

    placed = [put(module, symbol) for symbol in symbols]
    order.shuffle(placed)

    assert all(seam.undo() for seam in placed)
    assert (vars(module.Layer)["forward"], vars(module.Layer)["static"], module.double) == before
