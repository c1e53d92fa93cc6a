"""Inductor's mixed-order reductions with the overlay: none is fused if its second result is part of another tensor.

The case of pack 62 needs a GPU. These tests call the functions that decide about fusions and make cache keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from placed_seams import assert_self_test, placed, stock, without_overlays

from megacpp_overlays.feature_probes.mix_order_reduction_views import BOUND_ANEW, CACHE, CACHED, CLASS, FUSED, TARGET
from megacpp_overlays.overlays.mix_order_reduction_views import PARTS, observe_key

pytestmark = pytest.mark.upstream

FUSION, KEY = PARTS

module = stock(TARGET.module)


@pytest.fixture
def repaired(module: ModuleType) -> Iterator[ModuleType]:
    """The module with the seams."""
    with placed(FUSION, BOUND_ANEW, module):
        yield module


def test_the_self_tests_see_the_defect_and_its_absence(module: ModuleType) -> None:
    assert_self_test(FUSION, module, BOUND_ANEW)


def reduction(*written: Any, contiguous: bool = False, second_half: Sequence[Any] = ()) -> Any:
    """Return a reduction that writes buffers of these layouts; with a second half it is split in two."""
    users = [SimpleNamespace(node=reduction(*second_half))] if second_half else []
    users.append(SimpleNamespace(node=SimpleNamespace(get_name=lambda: "OUTPUT")))
    made = SimpleNamespace(is_reduction=lambda: True, is_contiguous=contiguous, get_name=lambda: "op0")
    made.get_outputs = lambda: [SimpleNamespace(node=SimpleNamespace(layout=each), users=users) for each in written]
    made.get_nodes = lambda: [made]
    return made


def pointwise() -> Any:
    """Return a node that is no reduction; any other attribute is an error."""
    return SimpleNamespace(is_reduction=lambda: False)


def upstream_decides(module: ModuleType, monkeypatch: pytest.MonkeyPatch, first: Any, second: Any) -> bool:
    """Return whether upstream decides about the fusion of two nodes."""
    cls, seen = getattr(module, CLASS), []
    monkeypatch.setattr(cls, "is_contiguous_node", classmethod(lambda _, node: node.is_contiguous))

    class Graph:
        @property
        def cpp_wrapper(self) -> bool:
            seen.append(None)
            return True

    with module.V.set_graph_handler(Graph()):
        assert not cls.can_fuse(first, second)
    return bool(seen)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_second_result_that_is_a_part_is_not_fused(
    repaired: ModuleType, monkeypatch: pytest.MonkeyPatch, swapped: bool
) -> None:
    part = object.__new__(repaired.ir.NonOwningLayout)
    whole = object.__new__(repaired.ir.FixedLayout)
    rows = reduction(whole, contiguous=True)
    for columns, expected in (
        (reduction(part), False),
        (reduction(whole, part), False),
        (reduction(whole, second_half=(part,)), False),
        (reduction(whole), True),
        (reduction(whole, second_half=(whole,)), True),
    ):
        pair = (columns, rows) if swapped else (rows, columns)
        assert upstream_decides(repaired, monkeypatch, *pair) == expected


def test_a_first_result_that_is_a_part_is_written_where_it_is(
    repaired: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, whole = (object.__new__(getattr(repaired.ir, name)) for name in ("NonOwningLayout", "FixedLayout"))

    assert upstream_decides(repaired, monkeypatch, reduction(part, contiguous=True), reduction(whole))
    assert upstream_decides(repaired, monkeypatch, pointwise(), reduction(whole))


@pytest.mark.parametrize(
    ("to", "layout", "expected"),
    [("second", "NonOwningLayout", False), ("second", "FixedLayout", True), ("first", "NonOwningLayout", True)],
)
def test_a_result_that_is_a_part_is_not_added_to_a_second_one(
    repaired: ModuleType, to: str, layout: str, expected: bool
) -> None:
    """Upstream's answer would be that its scheduler can fuse none."""
    asked: list[Any] = []
    fused = object.__new__(getattr(repaired, FUSED))
    fused.node1, fused.node2 = reduction(contiguous=True), reduction()
    fused.scheduler = SimpleNamespace(can_fuse=lambda *_, **__: asked.append(None))
    added = reduction(object.__new__(getattr(repaired.ir, layout)))

    assert not fused.sub_node_can_fuse(fused.node2 if to == "second" else fused.node1, added, ())
    assert bool(asked) == expected


def test_keys_of_compiled_graphs_are_their_own(module: ModuleType) -> None:
    def key(cache: ModuleType) -> str:
        graph = torch.fx.symbolic_trace(torch.nn.Tanh())
        found: str = cache.compiled_fx_graph_hash(graph, [torch.ones(1)], {}, [0])[0]
        return found

    with without_overlays(CACHE.module) as cache:
        stock = key(cache)
        assert observe_key(cache).broken
        with placed(KEY, CACHED, cache):
            assert not observe_key(cache).broken
            assert key(cache) not in {stock, ""}
            assert key(cache) == key(cache)
        assert key(cache) == stock
