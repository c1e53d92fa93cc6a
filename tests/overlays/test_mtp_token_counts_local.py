"""Real losses of multi-token prediction on ranks with unequal tokens with the overlay: the mean over the tokens of all of them.

The measurements are in `counted_tokens.py`, which runs in its own process for each release and forks ranks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from placed_seams import assert_witness_and_self_test, placed
from places import SUPPORT
from released_megatron import ALL_ON
from releases import daily, newest
from upstream_imports import upstream_module

from megacpp_overlays.feature_probes.mtp_token_counts_local import LOCAL, LOSS, ROLL, TARGET
from megacpp_overlays.loader import live_names, seams
from megacpp_overlays.overlays.mtp_token_counts_local import OVERLAY

pytestmark = pytest.mark.upstream

OLDER, NEWEST = ("0.17.1", "0.18.2"), newest()
DATA, PAIRS, CONTEXT = "1", "2", "4"
"""Context parallel ranks of four ranks in all."""
UNTOUCHED = ("means", "unequal")
ROUNDING = 1e-6
"""Relative, of the largest value, in fp32."""
MAKE = {each.symbol: each.make for each in OVERLAY.replacements[LOCAL]}


@pytest.fixture(scope="module", params=daily(*OLDER, NEWEST))
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, megatron_says: Callable[..., Any]
) -> tuple[str, Any]:
    """A release, and its results with the overlay and without it, by context parallel ranks and then by rank."""
    version, folder = request.param, tmp_path_factory.mktemp("ranks")
    more = [] if version == NEWEST else ["briefly"]
    return version, megatron_says(version, SUPPORT / "counted_tokens.py", folder, *more, **ALL_ON)


def each_way(found: Any, state: str) -> Iterator[tuple[str, str, list[Any]]]:
    """Yield each layout and each way with the results of all ranks."""
    layouts = [each for each in found["ranks"][0] if each != "alone"]
    for layout in layouts:
        for way in found["ranks"][0][layout].get(state, ()):
            yield layout, way, [rank[layout][state][way] for rank in found["ranks"]]


def test_upstream_weighs_predictions_with_the_tokens_of_a_rank(measured: tuple[str, Any]) -> None:
    _, found = measured

    for layout, way, ranks in each_way(found, "neither"):
        alone = (layout, way) == (DATA, "row, nothing")  # one rank has all tokens, and its counts are those of all
        assert (ranks[0]["apart"] > 0.01) == (not alone), (layout, way)


def test_a_rank_without_tokens_of_the_main_loss_has_a_target_all_the_same(measured: tuple[str, Any]) -> None:
    _, found = measured

    ranks = [rank[PAIRS]["both"]["row, few"] for rank in found["ranks"]]
    assert 0.0 in [each["own tokens"] for each in ranks]
    assert len({rank[PAIRS]["neither"]["row, few"]["bits"] for rank in found["ranks"]}) == len(ranks)
    assert found["ranks"][0][PAIRS]["neither"]["row, few"]["apart"] > 0.3
    assert ranks[0]["apart"] < ROUNDING


def test_gradients_are_those_of_the_mean_over_the_tokens_of_all_ranks(measured: tuple[str, Any]) -> None:
    version, found = measured

    assert found["decision"] == "active", found["reason"]
    layouts = set()
    for layout, way, ranks in each_way(found, "both"):
        layouts.add(layout)
        assert all(each["finite"] for each in ranks)
        if way not in UNTOUCHED:
            assert ranks[0]["apart"] < ROUNDING, (layout, way)
    assert layouts == ({DATA, PAIRS, CONTEXT} if version == NEWEST else {DATA, PAIRS})


def test_it_does_so_with_the_overlay_of_padded_rows_and_without_it(measured: tuple[str, Any]) -> None:
    version, found = measured

    for layout, way, ranks in each_way(found, "counts"):
        if way not in (*UNTOUCHED, "padded"):
            assert ranks[0]["apart"] < ROUNDING, (layout, way)
    for state, right in (("both", True), ("counts", True), ("rolls", False), ("neither", False)):
        if version == NEWEST or state in {"both", "neither"}:
            padded = found["ranks"][0][DATA][state]["padded"]
            assert (padded["apart from its own rolls"] < ROUNDING) == right, state
            assert (padded["apart"] < ROUNDING) == (state == "both"), state


def test_logged_values_and_untouched_ways_are_upstream_s_bit_for_bit(measured: tuple[str, Any]) -> None:
    version, found = measured
    same = [("both", "neither")] if version != NEWEST else [("both", "rolls"), ("counts", "neither")]

    for rank in found["ranks"]:
        assert len(set(rank["alone"].values())) == 1
    for one, other in same:
        for (layout, way, ours), (_, _, theirs) in zip(each_way(found, one), each_way(found, other), strict=True):
            if way in UNTOUCHED:
                assert [each["bits"] for each in ours] == [each["bits"] for each in theirs], (layout, way)
            elif not (way == "padded" and version != NEWEST):
                assert [each["logged"] for each in ours] == [each["logged"] for each in theirs], (layout, way)


# In this process


class Group:
    """Stand-in for a process group."""

    def __init__(self, ranks: int = 2) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks


OWN = Group()
"""The context parallel group of the process."""


class Ranks:
    """A module whose process is one of two ranks; the other one has five tokens of the main loss and two of each prediction."""

    def __init__(self, *, data: int = 2, known: bool = True) -> None:
        self.asked = 0
        self.torch = SimpleNamespace(
            is_grad_enabled=torch.is_grad_enabled,
            stack=torch.stack,
            full_like=torch.full_like,
            distributed=SimpleNamespace(all_reduce=self._all_reduce),
        )
        self.parallel_state = SimpleNamespace(
            model_parallel_is_initialized=lambda: known,
            get_context_parallel_group=lambda: OWN,
            get_data_parallel_group=lambda with_context_parallel: Group(data),
        )

    def _all_reduce(self, counts: torch.Tensor, group: Any) -> None:
        assert group.size() == 2
        self.asked += 1
        counts += torch.tensor([5.0, 2.0])


def loss_of(module: Any, seen: list[Any]) -> Callable[..., Any]:
    """Return the loss with the seam around one that keeps its config, rolls a mask and returns its factor and its choice."""

    def upstream(
        labels: Any, loss_mask: Any, config: Any, cp_group: Any = None, packed_seq_params: Any = None, count: Any = None
    ) -> Any:
        seen.append(config)
        if labels is None:
            roll(torch.tensor(9))
            roll(torch.tensor(4))
        roll(torch.tensor(7))
        roll(torch.tensor(3) if count is None else count)
        return config.mtp_loss_scaling_factor, config.calculate_per_token_loss, config.mtp_num_layers

    roll = MAKE[ROLL](lambda total: (None, total), module)
    return MAKE[LOSS](upstream, module)


def config(**fields: Any) -> Any:
    return SimpleNamespace(
        **{"calculate_per_token_loss": True, "mtp_loss_scaling_factor": 0.5, "mtp_num_layers": 1, **fields}
    )


@pytest.mark.parametrize(
    ("ranks", "fields", "given", "gradients"),
    [
        ({"data": 1}, {}, {}, True),
        ({"known": False}, {}, {}, True),
        ({}, {"calculate_per_token_loss": False}, {}, True),
        ({}, {"hybrid_context_parallel": True}, {}, True),
        ({}, {"dynamic_context_parallel": True}, {}, True),
        ({}, {}, {"cp_group": Group()}, True),
        ({}, {}, {"cp_group": OWN, "packed_seq_params": SimpleNamespace(cp_group=Group())}, True),
        ({}, {}, {}, False),
    ],
    ids=[
        "one rank",
        "ranks are not known",
        "no sum over tokens",
        "hybrid",
        "dynamic",
        "the model has a group of its own",
        "the row has a group of its own",
        "no gradient is asked for",
    ],
)
def test_upstream_runs_with_its_own_config_where_its_counts_are_right_or_must_do(
    ranks: dict[str, Any], fields: dict[str, Any], given: dict[str, Any], gradients: bool
) -> None:
    module, seen, asked = Ranks(**ranks), list[Any](), config(**fields)

    with contextlib.nullcontext() if gradients else torch.no_grad():
        found = loss_of(module, seen)(torch.zeros(1, 4), None, asked, **given)

    assert seen == [asked]
    assert found == (0.5, asked.calculate_per_token_loss, 1)
    assert module.asked == 0


@pytest.mark.parametrize(
    ("labels", "mask", "main"),
    [
        (torch.zeros(1, 4), torch.tensor([[1.0, 1.0, 0.0, 0.0]]), 2),
        (torch.zeros(1, 4), torch.tensor([[True, True, True, False]]), 3),
        (torch.zeros(1, 4, dtype=torch.int64), None, 4),
        (None, torch.ones(1, 8), 4),
    ],
    ids=["a mask", "of booleans", "none", "labels from ids"],
)
def test_counts_of_all_ranks_go_into_the_factor_for_every_mask(labels: Any, mask: Any, main: int) -> None:
    module = Ranks()

    factor, sums, layers = loss_of(module, [])(
        labels, mask, config=config(), cp_group=OWN, packed_seq_params=SimpleNamespace(cp_group=OWN)
    )

    assert (sums, layers, module.asked) == (False, 1, 1)
    assert float(factor) == pytest.approx(0.5 * 3 * (main + 5) / (3 + 2))


def test_a_rank_that_has_none_divides_by_one_as_upstream_does() -> None:
    factor, *_ = loss_of(Ranks(), [])(torch.zeros(1, 4), None, config(), count=torch.tensor(0))

    assert float(factor) == pytest.approx(0.5 * 1 * (4 + 5) / 2)


def test_rolls_count_during_a_loss_alone_and_in_its_thread_alone() -> None:
    module, seen = Ranks(), list[Any]()
    roll = MAKE[ROLL](lambda total: (None, total), module)

    def upstream(labels: Any, loss_mask: Any, config: Any) -> None:
        seen.append(config)
        other = threading.Thread(target=roll, args=(torch.tensor(1),))
        other.start()
        other.join()
        roll(torch.tensor(2))
        raise RuntimeError("upstream")

    with pytest.raises(RuntimeError, match="upstream"):
        MAKE[LOSS](upstream, module)(torch.zeros(1, 4), None, config())
    roll(torch.tensor(3))

    assert [int(each) for each in seen[0].sums] == [2]


@pytest.mark.parametrize("is_repaired", [True, False])
def test_a_loss_within_a_loss_has_rolls_of_its_own(is_repaired: bool) -> None:
    module, seen = Ranks(), list[Any]()
    roll = MAKE[ROLL](lambda total: (None, total), module)

    def upstream(labels: Any, loss_mask: Any, config: Any, within: Any = None) -> None:
        seen.append(config)
        if within is not None:
            loss(labels, loss_mask, within)
        roll(torch.tensor(1 if within is None else 2))

    loss = MAKE[LOSS](upstream, module)
    loss(torch.zeros(1, 4), None, config(), config(calculate_per_token_loss=is_repaired))

    assert [[int(each) for each in one.sums] for one in seen if hasattr(one, "sums")] == [[2], [1]][: 1 + is_repaired]


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return upstream_module(TARGET.module)


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(module: ModuleType) -> None:
    assert_witness_and_self_test(OVERLAY, module, LOCAL)


def test_half_of_the_seams_and_a_loss_that_is_scaled_otherwise_fail_the_self_test(module: ModuleType) -> None:
    right = module.MTPLossAutoScaler
    with placed(OVERLAY, LOCAL, module):
        module.MTPLossAutoScaler = SimpleNamespace(apply=lambda states, loss: right.apply(states, loss * 1.01))
        try:
            assert OVERLAY.self_test(module).broken
            module.MTPLossAutoScaler = SimpleNamespace(apply=lambda states, _loss: states * 1)
            assert OVERLAY.self_test(module).broken
        finally:
            module.MTPLossAutoScaler = right
        assert not OVERLAY.self_test(module).broken
    owner, name = live_names.resolve(module, LOSS)
    seam = seams.replace(owner, name, lambda f: MAKE[LOSS](f, module), overlay_id=OVERLAY.id)
    try:
        with pytest.raises(IndexError):
            OVERLAY.self_test(module)
    finally:
        seam.undo()
