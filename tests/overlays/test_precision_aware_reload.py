"""A precision-aware optimizer with the overlay: its next step starts from weights that were loaded.

Cases of pack 70 need Transformer Engine, whose FusedAdam keeps main weights. Here the class of the newest release has one whose state and setter are FusedAdam's; it takes no steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from installed import python_of
from placed_seams import assert_self_test, placed, stock
from places import ROOT
from reproduced_pack import assert_repaired, reproduced_in

from megacpp_overlays.feature_probes.precision_aware_reload import STALE, TARGET
from megacpp_overlays.overlays.precision_aware_reload import OVERLAY
from megacpp_overlays.runtime.bare_instances import bare

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore::UserWarning")]

module = stock(TARGET.module)


@pytest.mark.skipif(not (ROOT / ".envs/te/.ready").exists(), reason="make te builds Transformer Engine")
def test_fused_adam_is_broken_without_the_overlay_and_right_with_it() -> None:
    assert python_of("te")
    assert_repaired(reproduced_in("te", "70"))


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(module: ModuleType) -> None:
    assert_self_test(OVERLAY, module, STALE)


@pytest.fixture(scope="module")
def optimizer(module: ModuleType) -> Iterator[Callable[..., Any]]:
    """Return, with the seam, an optimizer with one weight and the main weight of it."""

    def make(weight: torch.Tensor, main: torch.Tensor | None, **attributes: Any) -> Any:
        state = {weight: {"master_param": main}} if main is not None else {}
        adam = SimpleNamespace(state=state, set_scaled_state=lambda each, name, value: state[each][name].copy_(value))
        upstream = module.MixedPrecisionOptimizer
        return bare(
            type("Whole", (upstream,), dict.fromkeys(upstream.__abstractmethods__)),
            **{
                "optimizer": adam,
                "is_stub_optimizer": True,
                "config": SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=True),
                "model_float16_groups": [[weight]],
                "shard_float16_groups": [[weight]],
                "_get_model_param_range_map": lambda _: {"param": SimpleNamespace(start=0, end=weight.numel())},
                **attributes,
            },
        )

    with placed(OVERLAY, STALE, module):
        yield make


def test_a_main_weight_that_a_step_will_make_is_not_made(optimizer: Callable[..., Any]) -> None:
    whole = optimizer(torch.ones(2, dtype=torch.bfloat16), None)

    whole.reload_model_params()

    assert whole.optimizer.state == {}


def test_a_part_of_a_weight_gets_its_part(optimizer: Callable[..., Any]) -> None:
    weight = torch.arange(6.0).bfloat16().view(2, 3)
    shard = weight.view(-1)[2:4]
    main = torch.zeros(2)
    whole = optimizer(
        shard,
        main,
        model_float16_groups=[[weight]],
        _get_model_param_range_map=lambda _: {"param": SimpleNamespace(start=2, end=4)},
    )

    whole.reload_model_params()
    whole.reload_model_params()

    assert main.tolist() == [2.0, 3.0]


def test_a_state_dict_has_main_weights_that_are_more_precise(optimizer: Callable[..., Any]) -> None:
    weight, main = torch.ones(1).bfloat16(), torch.zeros(1)
    precise = torch.tensor([1.001])
    whole = optimizer(weight, main, _build_model_param_to_state_dict_param_map=lambda each: {weight: each["weight"]})

    whole.reload_model_params(state_dict={"weight": precise})

    assert torch.equal(main, precise)


@pytest.mark.parametrize(
    "attributes",
    [
        {"config": SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False)},
        {"optimizer": None},
    ],
    ids=["not-precision-aware", "no-optimizer"],
)
def test_other_optimizers_are_upstream_s(optimizer: Callable[..., Any], attributes: Any) -> None:
    weight, main = torch.ones(1).bfloat16(), torch.zeros(1)

    optimizer(weight, main, **attributes).reload_model_params()

    assert main.tolist() == [0.0]


def joined(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the float32 weights that FusedAdam steps from: upper and lower halves of 32 bits."""
    upper = weight.view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((upper << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=8), st.booleans())
def test_remainders_are_the_difference_from_the_loaded_weight(
    optimizer: Callable[..., Any], values: list[float], has_state_dict: bool
) -> None:
    precise = torch.tensor(values, dtype=torch.float32)
    weight = precise.bfloat16()
    remainder = torch.full(weight.shape, 77, dtype=torch.int16)
    whole = optimizer(weight, remainder, _build_model_param_to_state_dict_param_map=lambda each: {weight: each})

    whole.reload_model_params(precise if has_state_dict else None)

    right = precise if has_state_dict else weight.float()
    assert torch.allclose(joined(weight, remainder), right, rtol=2**-8, atol=0)
    is_tie = (precise.view(torch.int32) & 0xFFFF) == 0x8000  # rounded to even here, and up by FusedAdam
    assert torch.equal(joined(weight, remainder)[~is_tie], right[~is_tie])
