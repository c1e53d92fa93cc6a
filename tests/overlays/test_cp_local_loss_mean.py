"""Real steps of Megatron's schedule on context parallel ranks with the overlay: the mean over ranks is that of whole sequences.

The measurements are in `context_losses.py`, which runs in its own interpreter for each release and forks ranks.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from placed_seams import assert_witness_and_self_test, placed
from places import SUPPORT
from released_megatron import ALL_ON
from releases import daily, newest
from upstream_imports import upstream_module

from megacpp_overlays.feature_probes.cp_local_loss_mean import OWN_COUNT, TARGET
from megacpp_overlays.overlays.cp_local_loss_mean import OVERLAY

pytestmark = pytest.mark.upstream

ALONE, SHARED = "1", ("2", "4")
OLDEST, NEWEST = "0.14.0", newest()
ROUNDING = 1e-6


@pytest.fixture(scope="module")
def off(tmp_path_factory: pytest.TempPathFactory, megatron_says: Callable[..., Any]) -> Any:
    """Results of the newest release without the overlay."""
    folder = tmp_path_factory.mktemp("off")
    return megatron_says(newest(), SUPPORT / "context_losses.py", folder, MEGACPP_OVERLAYS="off")


@pytest.fixture(scope="module", params=daily(OLDEST, NEWEST))
def on(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, megatron_says: Callable[..., Any]
) -> tuple[str, Any]:
    """A release, and its results with the overlay."""
    folder = tmp_path_factory.mktemp("on")
    return request.param, megatron_says(request.param, SUPPORT / "context_losses.py", folder, **ALL_ON)


def test_upstream_weighs_a_token_more_where_a_rank_has_fewer(off: Any) -> None:
    assert off["decision"] == "disabled"
    for ranks in SHARED:
        every = [rank[ranks]["apart"] for rank in off["ranks"]]
        assert min(rank["last third"][0] for rank in every) > 0.005
        assert max(rank["last third"][1] for rank in every) > 0.005
        # two sequences, three microbatches: the weight that one rank gives it, less an n-th
        lone = 1 / 2 / 3 * (1 - 1 / int(ranks))
        assert max(rank["one alone"][1] for rank in every) == pytest.approx(lone)
        assert max(max(rank["all"]) for rank in every) < ROUNDING
    assert max(max(rank[ALONE]["apart"]["last third"]) for rank in off["ranks"]) < ROUNDING


def test_loss_and_gradients_are_those_of_whole_sequences(on: tuple[str, Any]) -> None:
    _, found = on

    assert found["decision"] == "active", found["reason"]
    for rank in found["ranks"]:
        for ranks in (ALONE, *SHARED):
            masks = rank[ranks]["apart"]
            assert set(masks) == {"all", "last third", "one alone", "none"}
            for mask, off_by in masks.items():
                if (ranks, mask, on[0]) != (ALONE, "none", OLDEST):  # there upstream divides nothing by nothing
                    assert max(off_by) < ROUNDING, (ranks, mask)


def test_it_has_the_bits_of_a_loss_function_that_sums_the_counts_itself(on: tuple[str, Any]) -> None:
    _, found = on

    for rank in found["ranks"]:
        for ranks in SHARED:
            assert rank[ranks]["last third"] == rank[ranks]["same"]["summed"]


def test_a_caller_that_does_not_say_how_many_ranks_there_are_gets_those_of_the_process(on: tuple[str, Any]) -> None:
    _, found = on

    for rank in found["ranks"]:
        for ranks in (ALONE, *SHARED):
            assert rank[ranks]["unsaid"] == rank[ranks]["last third"]


def test_where_nothing_is_uneven_it_is_upstream_s_bit_for_bit(on: tuple[str, Any], off: Any) -> None:
    """All tokens count, the loss function summed the counts, losses are per token, there are two outputs or no loss."""
    _, found = on

    for with_it, alone in zip(found["ranks"], off["ranks"], strict=True):
        for ranks in (ALONE, *SHARED):
            assert with_it[ranks]["same"] == alone[ranks]["same"]
        assert with_it[ALONE]["last third"] == alone[ALONE]["last third"]


def test_the_loss_is_divided_in_place_and_the_rank_s_own_count_is_handed_on(on: tuple[str, Any], off: Any) -> None:
    """Megatron's combined schedule keeps the loss function's tensor, and sums of counts are the caller's business."""
    _, found = on

    for with_it, alone in zip(found["ranks"], off["ranks"], strict=True):
        for ranks in (ALONE, *SHARED):
            assert with_it[ranks]["is the loss function's"] == [True, True, 1]
            assert with_it[ranks]["counted"] == alone[ranks]["counted"]


def test_a_model_s_own_group_is_the_one_that_is_asked(on: tuple[str, Any], off: Any) -> None:
    """The two ranks of the model's own group hold the same parts, so upstream's mean is right."""
    _, found = on

    for with_it, alone in zip(found["ranks"], off["ranks"], strict=True):
        assert with_it["2"]["the model's group"] == alone["2"]["last third"] != with_it["2"]["last third"]


def test_where_no_group_has_so_many_ranks_a_step_is_refused(on: tuple[str, Any], off: Any) -> None:
    _, found = on

    for with_it, alone in zip(found["ranks"], off["ranks"], strict=True):
        for ranks in (ALONE, *SHARED):
            assert OVERLAY.variable in with_it[ranks]["of another size"]
            assert alone[ranks]["of another size"] is None


def test_a_count_may_be_a_plain_number_and_there_may_be_no_loss_function(on: tuple[str, Any], off: Any) -> None:
    release, found = on

    for with_it, alone in zip(found["ranks"], off["ranks"], strict=True):
        for ranks in (ALONE, *SHARED):
            if release == NEWEST:
                assert with_it[ranks]["no function"] == alone[ranks]["no function"]
            else:
                assert max(with_it[ranks]["a plain number"]) < ROUNDING


# In this process


@pytest.fixture
def module() -> ModuleType:
    upstream_module("megatron.core.transformer.multi_token_prediction")
    return upstream_module(TARGET.module)


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(module: ModuleType) -> None:
    importing = builtins.__import__

    assert_witness_and_self_test(OVERLAY, module, OWN_COUNT)

    assert builtins.__import__ is importing


def test_a_self_test_answers_its_own_thread_alone(module: ModuleType) -> None:
    """Another thread that asks while it runs gets the real class, and sums over the ranks of the process, of which there are none."""
    entry = module.forward_step_calc_loss
    said: list[Any] = []

    def elsewhere() -> None:
        from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

        said.append(MTPLossAutoScaler is not None)
        try:
            module.torch.distributed.all_reduce(module.torch.zeros(2))
        except ValueError as error:
            said.append(str(error))

    def and_meanwhile(*args: Any) -> Any:
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        return entry(*args)

    module.forward_step_calc_loss = and_meanwhile
    try:
        with placed(OVERLAY, OWN_COUNT, module):
            assert not OVERLAY.self_test(module).broken
    finally:
        module.forward_step_calc_loss = entry
    assert len(said) == 4
    assert said[0] is True
    assert "has not been initialized" in said[1]


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda loss, tokens: (loss * 1.01, tokens),
        lambda loss, tokens: (loss.mean().expand(2), tokens * 2),
        lambda loss, tokens: ((loss.detach() - loss) + loss.detach(), tokens),
    ],
    ids=["the loss", "the count", "the gradient"],
)
def test_a_change_of_one_of_its_numbers_fails_the_self_test(module: ModuleType, spoilt: Callable[..., Any]) -> None:
    upstream = module.forward_step_calc_loss
    with placed(OVERLAY, OWN_COUNT, module):
        right = module.forward_step_calc_loss
        module.forward_step_calc_loss = lambda *args: spoilt(*right(*args))
        assert OVERLAY.self_test(module).broken
        module.forward_step_calc_loss = right
    assert module.forward_step_calc_loss is upstream


def called(module: ModuleType, *sizes: Any) -> tuple[float, int]:
    """Return the loss of six over a count of three, of a model in a wrapper that knows no groups."""
    import torch

    model = torch.nn.Module()
    model.module = torch.nn.Identity()
    config = SimpleNamespace(calculate_per_token_loss=False, timers=None)
    six = (torch.tensor(6.0), lambda each: (each, torch.tensor(3), None), config, None, False, 1, [])
    loss, tokens = module.forward_step_calc_loss(model, *six, *sizes)
    return float(loss), int(tokens)


def test_without_process_groups_it_is_upstream_s(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.parallel_state, "is_pipeline_last_stage", lambda **_: True)

    with placed(OVERLAY, OWN_COUNT, module):
        assert called(module) == called(module, 1, True) == (2.0, 3)


def test_without_process_groups_a_caller_that_says_there_are_ranks_is_refused(module: ModuleType) -> None:
    with placed(OVERLAY, OWN_COUNT, module), pytest.raises(RuntimeError, match=OVERLAY.variable):
        called(module, 2, True)
