"""Muon with the overlay: a gate and its values, and keys and values of multi-latent attention, are orthogonalized as matrices of their own.

Cases of pack 69 take steps of the release. Further tests call the function that makes the optimizer in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from placed_seams import assert_self_test, placed, stock
from places import SUPPORT
from released_megatron import ALL_ON
from releases import newest
from reproduced_pack import assert_repaired

from megacpp_overlays.feature_probes.muon_gated_fc1 import AS_ONE, TARGET
from megacpp_overlays.overlays.muon_gated_fc1 import OVERLAY

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore::UserWarning")]

NEWEST = newest()
module = stock(TARGET.module)


def test_the_newest_release_is_right_with_it(megatron_says: Callable[..., Any]) -> None:
    assert_repaired(megatron_says(NEWEST, SUPPORT / "reproduced.py", "69", **ALL_ON))


def test_the_self_test_sees_the_defect_and_its_absence(module: ModuleType) -> None:
    assert_self_test(OVERLAY, module, AS_ONE)


@pytest.fixture
def make(module: ModuleType) -> Iterator[Callable[..., Any]]:
    """The function that makes an optimizer, with the seam."""
    with placed(OVERLAY, AS_ONE, module):
        yield module._create_emerging_optimizer


def gated(rows: int = 8, name: str = "weight", kind: str = "MLP", **config: Any) -> Any:
    """Return a layer with a first linear layer of so many rows of two columns."""
    layer = type(kind, (torch.nn.Module,), {})()
    heads = {"num_attention_heads": 1, "num_query_groups": 1, "kv_channels": 2}
    layer.config = SimpleNamespace(gated_linear_unit=True, **heads, **config)
    layer.linear_fc1 = torch.nn.Module()
    layer.linear_fc1.register_parameter(name, torch.nn.Parameter(torch.zeros(rows, 2)))
    return layer


def shapes(make: Callable[..., Any], layer: Any, name: str = "muon") -> list[int] | None:
    """Return the numbers of rows by which the weight of the layer is split."""
    (weight,) = layer.parameters()
    make(SimpleNamespace(lr=0.1, adam_beta1=0.9, adam_beta2=0.95), [weight], name, [layer], None)
    return getattr(weight, "qkv_split_shapes", None)


def test_a_gate_and_its_values_are_halves(make: Callable[..., Any]) -> None:
    assert shapes(make, gated()) == [4, 4]


@pytest.mark.parametrize(
    ("kind", "option"),
    [("TEGroupedMLP", "moe_mlp"), ("SharedExpertMLP", "moe_shared_expert")],
    ids=["experts", "shared-expert"],
)
def test_interleaved_rows_of_a_grouped_layer_are_taken_apart_by_blocks(
    make: Callable[..., Any], kind: str, option: str
) -> None:
    interleaved = {f"{option}_glu_interleave_size": 2}
    assert shapes(make, gated(name="weight0", kind=kind, **interleaved)) == [2, 2]
    assert shapes(make, gated(kind=kind, **interleaved)) == [4, 4], "a layer that is not grouped has no blocks"


@pytest.mark.parametrize("name", ["weight_scale", "bias"])
def test_only_weights_are_taken_apart(make: Callable[..., Any], name: str) -> None:
    assert shapes(make, gated(name=name)) is None


def test_rows_that_are_on_several_ranks_stay_one_matrix(make: Callable[..., Any]) -> None:
    layer = gated()
    layer.linear_fc1.weight.is_gtp_weight_remat = True
    assert shapes(make, layer) is None


def test_other_optimizers_get_no_shapes(make: Callable[..., Any]) -> None:
    assert shapes(make, gated(), name="soap") is None


def test_queries_keys_and_values_stay_one_matrix_where_their_split_is_off(make: Callable[..., Any]) -> None:
    layer = gated()
    weights = [layer.linear_fc1.weight, torch.nn.Parameter(torch.zeros(6, 2))]
    weights[1].is_qkv, weights[1].qkv_split_shapes = True, [2, 2, 2]
    optimizer, _ = make(SimpleNamespace(muon_split_qkv=False), weights, "muon", [layer], None)
    assert [optimizer.is_qkv_fn(each) for each in weights] == [True, False]
