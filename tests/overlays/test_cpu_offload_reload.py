"""Offloaded optimizers with the overlay: the first step after loading starts from the loaded weights.

Cases of pack 51 run on releases, in a process of its own for each; everything else runs on the newest one in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from placed_seams import assert_same_bits, assert_self_test, placed, stock
from places import ROOT
from releases import newest
from reproduced_pack import assert_repaired, measured_on

from megacpp_overlays.feature_probes.cpu_offload_reload import CLASS, METHOD, STALE, TARGET
from megacpp_overlays.overlays.cpu_offload_reload import OVERLAY
from megacpp_overlays.repro import beside, neighbour

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore")]

FOLDER = ROOT / "packs/51-cpu-offload-reload"
PACK = beside(str(FOLDER / "neighbours.py"))

measured = measured_on("51", "0.12.0", "0.13.1", "0.16.1", "0.18.2", newest())


def test_a_release_is_broken_without_the_overlay_and_right_with_it(measured: Any) -> None:
    assert_repaired(measured)


# In this process


module = stock(TARGET.module)


@pytest.fixture
def refreshing(module: ModuleType) -> Iterator[ModuleType]:
    """The newest release with the seam."""
    with placed(OVERLAY, STALE, module):
        yield module


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(module: ModuleType) -> None:
    assert_self_test(OVERLAY, module, STALE)


def test_the_newest_release_is_broken_without_the_overlay_and_right_with_it(module: ModuleType) -> None:
    assert all(case.run().broken for case in PACK.CASES)
    with placed(OVERLAY, STALE, module):
        assert not any(case.run().broken for case in PACK.CASES)


@pytest.mark.parametrize("each", neighbour.load(FOLDER), ids=lambda each: each.name)
def test_results_that_are_right_without_the_overlay_have_the_same_bits(
    each: neighbour.Neighbour, module: ModuleType
) -> None:
    assert_same_bits(each, OVERLAY, module, STALE)


def test_moments_stay_as_they_are(module: ModuleType) -> None:
    stock = PACK.trained(before=3, after=0)
    with placed(OVERLAY, STALE, module):
        ours = PACK.trained(before=3, after=0)

    assert ours["masters"] == [[PACK.LOADED] * PACK.WIDTH] * 2
    for name in ("exp_avg", "exp_avg_sq"):
        assert ours[name] == stock[name] != []


def test_training_after_loading_equals_that_of_an_ordinary_optimizer(refreshing: ModuleType) -> None:
    offloaded = PACK.trained(after=3)
    ordinary = PACK.trained(after=3, optimizer_cpu_offload=False)

    for name in (*PACK.NAMES, "masters"):
        assert offloaded[name] == ordinary[name]


def optimizer_of(module: ModuleType, **held: Any) -> Any:
    """Return an optimizer of one loaded weight, with only the attributes that the method reads."""
    made = object.__new__(getattr(module, CLASS))
    hybrid = object.__new__(module.HybridDeviceOptimizer)
    main, inner = torch.full((2,), 7.0), torch.full((2,), 7.0)
    vars(hybrid).update(param_to_inner_param={main: inner}, param_to_fp32_param={})
    vars(made).update(
        optimizer=hybrid,
        is_stub_optimizer=True,
        ddp_config=SimpleNamespace(use_megatron_fsdp=False),
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
        model_float16_groups=[[torch.ones(3)]],
        shard_fp32_from_float16_groups=[[main]],
        model_fp32_groups=[],
        shard_fp32_groups=[],
        _get_model_param_range_map=lambda _: {"param": SimpleNamespace(start=1, end=3, size=2)},
    )
    vars(made).update(held)
    return made


def reloaded(made: Any, **given: Any) -> list[float]:
    """Copy weights to an optimizer; return the first number of its main weight and of its copy."""
    getattr(made, METHOD.rpartition(".")[2])(**given)
    ((main, inner),) = made.optimizer.param_to_inner_param.items()
    return [float(main[0]), float(inner[0])]


def test_main_weights_of_megatron_fsdp_are_left_alone(refreshing: ModuleType) -> None:
    made = optimizer_of(refreshing, ddp_config=SimpleNamespace(use_megatron_fsdp=True))

    assert reloaded(made) == [7.0, 7.0]


def test_a_given_state_dict_has_the_weights(refreshing: ModuleType) -> None:
    made = optimizer_of(refreshing)
    ((model,),) = made.model_float16_groups
    made._build_model_param_to_state_dict_param_map = {"a": {model: torch.full((3,), 3.0)}}.__getitem__

    assert reloaded(made, state_dict="a") == [3.0, 3.0]


def test_an_error_leaves_the_optimizer_in_its_place(refreshing: ModuleType) -> None:
    made = optimizer_of(refreshing, _get_model_param_range_map={}.__getitem__)
    hybrid = made.optimizer

    with pytest.raises(KeyError):
        reloaded(made)

    assert made.optimizer is hybrid


def test_the_seam_can_be_placed_twice(refreshing: ModuleType) -> None:
    with placed(OVERLAY, STALE, refreshing):
        assert reloaded(optimizer_of(refreshing)) == [1.0, 1.0]
