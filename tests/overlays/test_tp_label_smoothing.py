"""Real cross entropy with label smoothing on tensor parallel ranks with the overlay: it is the one of a single rank.

The measurements are in `smoothed_losses.py`, which runs in its own interpreter for each release and forks ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from placed_seams import assert_witness_and_self_test, placed
from places import SUPPORT
from released_megatron import ALL_ON
from releases import daily, newest
from upstream_imports import upstream_module

from megacpp_overlays.feature_probes.tp_label_smoothing import OWN_SHARE_OF_A_GROUP, TARGET
from megacpp_overlays.overlays.tp_label_smoothing import OVERLAY

pytestmark = pytest.mark.upstream

ALONE, SHARED = "1", ("2", "4")
ONE_GROUP, ANY_GROUP = ("0.14.0", "0.18.2"), newest()
ROUNDING = 2e-6
HALF = 0.004
"""Of a gradient below 1 in bfloat16."""


@pytest.fixture(scope="module")
def off(tmp_path_factory: pytest.TempPathFactory, megatron_says: Callable[..., Any]) -> Any:
    """Results of the newest release without the overlay."""
    folder = tmp_path_factory.mktemp("off")
    return megatron_says(newest(), SUPPORT / "smoothed_losses.py", folder, MEGACPP_OVERLAYS="off")


@pytest.fixture(scope="module", params=daily(*ONE_GROUP, ANY_GROUP))
def on(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, megatron_says: Callable[..., Any]
) -> tuple[str, Any]:
    """A release, and its results with the overlay."""
    more = ["compiled"] if request.param == ANY_GROUP else []
    folder = tmp_path_factory.mktemp("on")
    return request.param, megatron_says(request.param, SUPPORT / "smoothed_losses.py", folder, *more, **ALL_ON)


def test_upstream_has_another_loss_on_each_rank_and_gradients_that_push_all_classes(off: Any) -> None:
    assert off["decision"] == "disabled"
    for ranks in SHARED:
        every = [rank[ranks] for rank in off["ranks"]]
        assert len({tuple(rank["losses"]["0.1"]) for rank in every}) == int(ranks)
        assert max(rank["apart"]["0.1"][0] for rank in every) > 0.01
        assert max(rank["apart"]["0.1"][1] for rank in every) > 0.001
        assert sum(rank["sum"] for rank in every) < -0.1
    assert max(max(rank[ALONE]["apart"]["0.1"]) for rank in off["ranks"]) < ROUNDING


def test_losses_and_gradients_of_two_and_four_ranks_are_the_plain_ones(on: tuple[str, Any]) -> None:
    _, found = on

    assert found["decision"] == "active", found["reason"]
    for rank in found["ranks"]:
        for ranks in (ALONE, *SHARED):
            for losses, slopes in rank[ranks]["apart"].values():
                assert max(losses, slopes) < ROUNDING
            assert rank[ranks]["bfloat16"][0] < ROUNDING
            assert rank[ranks]["bfloat16"][1] < HALF


def test_all_ranks_have_the_same_losses_and_gradients_that_add_up_to_nothing(on: tuple[str, Any]) -> None:
    _, found = on

    for ranks in SHARED:
        every = [rank[ranks] for rank in found["ranks"]]
        assert all(rank["losses"] == every[0]["losses"] for rank in every)
        assert abs(sum(rank["sum"] for rank in every[: int(ranks)])) < ROUNDING


def test_results_of_one_rank_are_the_measure_for_a_class_of_no_rank_too(on: tuple[str, Any]) -> None:
    _, found = on
    losses, slopes = (torch.tensor(each) for each in found["ranks"][0][ALONE]["of no rank"])

    for ranks in SHARED:
        every = [rank[ranks]["of no rank"] for rank in found["ranks"][: int(ranks)]]
        for each, _ in every:
            torch.testing.assert_close(torch.tensor(each), losses, rtol=0, atol=ROUNDING)
        together = torch.cat([torch.tensor(share) for _, share in every], dim=-1)
        torch.testing.assert_close(together, slopes, rtol=0, atol=ROUNDING)


def test_where_probabilities_round_to_zero_losses_are_as_infinite_as_on_one_rank(on: tuple[str, Any]) -> None:
    _, found = on

    expected = found["ranks"][0][ALONE]["far"]
    assert "inf" in expected[0]
    assert expected[1]
    assert all(rank[ranks]["far"] == expected for rank in found["ranks"] for ranks in SHARED)


def test_without_smoothing_and_on_one_rank_it_is_upstream_s_bit_for_bit(on: tuple[str, Any], off: Any) -> None:
    _, found = on

    for with_it, alone in zip(found["ranks"], off["ranks"], strict=True):
        assert with_it[ALONE]["bits"] == alone[ALONE]["bits"]
        for ranks in (ALONE, *SHARED):
            assert with_it[ranks]["without smoothing"] == alone[ranks]["without smoothing"]
            assert with_it[ranks]["refused"] == alone[ranks]["refused"] == "AssertionError"


def test_a_group_that_the_caller_gives_is_the_one_that_is_asked(on: tuple[str, Any]) -> None:
    release, found = on

    for rank in found["ranks"]:
        for ranks in (ALONE, *SHARED):
            if release == ANY_GROUP:
                assert rank[ranks]["given"] == rank[ranks]["bits"]
                assert rank[ranks]["given, alone"] == rank[ALONE]["bits"]
            else:
                assert "given" not in rank[ranks]


def test_compiled_it_is_one_graph_as_upstream_s_is(on: tuple[str, Any]) -> None:
    release, found = on

    compiled = [rank["compiled"] for rank in found["ranks"] if "compiled" in rank]
    assert len(compiled) == (4 if release == ANY_GROUP else 0)
    for each in compiled:
        assert each["graphs"] == 1
        assert max(each["apart"]) < ROUNDING


# In this process


@pytest.fixture
def module() -> ModuleType:
    return upstream_module(TARGET.module)


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(module: ModuleType) -> None:
    assert_witness_and_self_test(OVERLAY, module, OWN_SHARE_OF_A_GROUP)


def test_a_self_test_answers_its_own_thread_alone(module: ModuleType) -> None:
    """Another thread that asks while it runs gets the real functions, which know no ranks here."""
    entry = module.vocab_parallel_cross_entropy
    said: list[str] = []

    def elsewhere() -> None:
        try:
            entry(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), 0.1)
        except (AssertionError, ValueError) as error:
            said.append(type(error).__name__)

    def and_meanwhile(*args: Any) -> Any:
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        return entry(*args)

    module.vocab_parallel_cross_entropy = and_meanwhile
    try:
        with placed(OVERLAY, OWN_SHARE_OF_A_GROUP, module):
            assert not OVERLAY.self_test(module).broken
    finally:
        module.vocab_parallel_cross_entropy = entry
    assert len(said) == 2


def test_a_loss_that_smooths_too_much_or_in_one_pass_alone_fails_the_self_test(module: ModuleType) -> None:
    function = vars(module)[TARGET.symbol.partition(".")[0]]
    right = module.vocab_parallel_cross_entropy

    with placed(OVERLAY, OWN_SHARE_OF_A_GROUP, module):
        forward = function.forward
        for spoilt in (
            lambda ctx, *args: forward(ctx, *args) * 1.01,
            lambda ctx, *args: (forward(ctx, *args), setattr(ctx, "vocab_size", 2))[0],
        ):
            function.forward = staticmethod(spoilt)
            assert OVERLAY.self_test(module).broken
        function.forward = staticmethod(forward)
        assert not OVERLAY.self_test(module).broken
    assert module.vocab_parallel_cross_entropy is right
