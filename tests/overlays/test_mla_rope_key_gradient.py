"""A real MLA on tensor parallel ranks with the overlay: gradients are those of one rank, and replicas stay the same.

The measurements are in `shared_keys.py`, which runs in its own process for each release and forks ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from placed_seams import assert_witness_and_self_test, placed, stock
from places import SUPPORT
from releases import newest, weekly
from shared_keys import ALONE, FOUR, RIGHT

from megacpp_overlays.feature_probes.mla_rope_key_gradient import BEHIND, TARGET
from megacpp_overlays.overlays.mla_rope_key_gradient import OVERLAY

pytestmark = pytest.mark.upstream

OLDEST, NEWEST = "0.14.0", newest()
RANKS = {OLDEST: ["2"], "0.16.1": ["2"], "0.17.1": ["2"], "0.18.2": ["2"], NEWEST: ["2", "4"]}
ROUNDING = 1e-5
"""Relative, of the largest value, in fp32."""


@pytest.fixture(scope="module", params=weekly(*RANKS))
def measured(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    megatron_says: Callable[..., Any],
    grid_size: str,
) -> tuple[str, Any]:
    """A release, and its results with the overlay and without it. Only the full tests use four ranks."""
    version, folder = request.param, tmp_path_factory.mktemp("ranks")
    numbers = RANKS[version] if grid_size == "all" else RANKS[version][:1]
    return version, megatron_says(version, SUPPORT / "shared_keys.py", folder, *numbers)


def each_way(found: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield each way with the results of all ranks."""
    for ranks in found.values():
        for name in ranks[0].keys() - {ALONE}:
            yield name, [each[name] for each in ranks]


def test_upstream_gives_down_projections_the_gradient_of_some_heads(measured: tuple[str, Any]) -> None:
    _, found = measured

    for name, ranks in each_way(found["off"]):
        if name != RIGHT:
            assert max(each["down apart"] for each in ranks) > 0.1, name
            assert max(each["hidden apart"] for each in ranks) > 0.1, name
            assert (max(each["replicas apart"] for each in ranks) > 0.01) == ("replicated" in name), name


def test_every_gradient_is_the_one_of_one_rank_and_replicas_stay_the_same(measured: tuple[str, Any]) -> None:
    _, found = measured

    assert found["decision"] == "active", found["reason"]
    for name, ranks in each_way(found["on"]):
        for each in ranks:
            assert max(each["down apart"], each["others apart"], each["hidden apart"]) < ROUNDING, name
            assert each["replicas apart"] == 0.0, name


def test_outputs_are_upstream_s_bit_for_bit_and_so_is_all_that_upstream_does_right(measured: tuple[str, Any]) -> None:
    _, found = measured

    for (name, with_it), (same, alone) in zip(each_way(found["on"]), each_way(found["off"]), strict=True):
        assert name == same
        assert [each["output bits"] for each in with_it] == [each["output bits"] for each in alone], name
        assert ([each["bits"] for each in with_it] == [each["bits"] for each in alone]) == (name == RIGHT), name
    one = {each[ALONE] for state in ("on", "off") for ranks in found[state].values() for each in ranks}
    assert len(one) == 1


def test_the_ways_are_those_that_a_release_can_go(measured: tuple[str, Any]) -> None:
    version, found = measured
    ways = found["on"]["2"][0].keys()

    assert {*FOUR} <= ways
    fused = {"0.17.1": {"fused, replicated"}, "0.18.2": {"fused, replicated"}}
    fused[NEWEST] = {"fused, columns", "fused, columns, sequence parallel"}
    assert {name for name in ways if name.startswith("fused")} == fused.get(version, set())


# In this process


module = stock(TARGET.module)


def test_witness_and_self_test_see_the_defect_and_its_absence(module: ModuleType) -> None:
    assert_witness_and_self_test(OVERLAY, module, BEHIND)


class Group:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks


@pytest.mark.parametrize(
    ("ranks", "parts", "grads"),
    [(1, False, True), (2, True, True), (2, False, False)],
    ids=["one rank", "parts of the sequence", "no gradient is asked for"],
)
def test_a_tensor_that_is_right_already_is_passed_on_itself(
    module: ModuleType, ranks: int, parts: bool, grads: bool
) -> None:
    given = torch.ones(2, 1, 6, requires_grad=True)
    config = SimpleNamespace(q_lora_rank=None, kv_lora_rank=4, qk_pos_emb_head_dim=2, sequence_parallel=parts)
    attention = SimpleNamespace(config=config, tp_group=Group(ranks), linear_kv_down_proj=lambda _hidden: (given, None))

    with placed(OVERLAY, BEHIND, module), torch.set_grad_enabled(grads):
        _, found = module.MLASelfAttention._qkv_down_projection(attention, torch.ones(2, 1, 3))

    assert found is given
