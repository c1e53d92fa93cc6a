"""Real rolls and the real loss of multi-token prediction on packed rows with the overlay: documents keep to themselves.

The measurements are in `rolled_rows.py`, which runs in its own interpreter for each release and forks ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from placed_seams import assert_witness_and_self_test, placed, stock
from places import SUPPORT
from releases import newest, weekly

from megacpp_overlays.feature_probes.mtp_roll_padded_boundaries import TARGET
from megacpp_overlays.overlays.mtp_roll_padded_boundaries import OVERLAY

pytestmark = pytest.mark.upstream

PADDED = ("padded", "padded with a tail", "first alone padded", "short")
AS_UPSTREAM = ("not padded", "not padded, and announced", "one document")
SHARED_AS_UPSTREAM = ("not padded", "one document")
WITHOUT_LOSS = "0.16.1"
"""There the loss is within the forward pass of the model."""
ROUNDING = 1e-6
"""Relative, of the largest value, in fp32."""


@pytest.fixture(scope="module", params=weekly(newest()))
def off(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, megatron_says: Callable[..., Any]
) -> Any:
    """Results of the newest release without the overlay."""
    return megatron_says(
        request.param, SUPPORT / "rolled_rows.py", tmp_path_factory.mktemp("off"), MEGACPP_OVERLAYS="off"
    )


@pytest.fixture(scope="module", params=weekly(WITHOUT_LOSS, "0.17.1", "0.18.2", newest()))
def on(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, megatron_says: Callable[..., Any]
) -> tuple[str, Any]:
    """A release, and its results with the overlay."""
    version: str = request.param
    return version, megatron_says(version, SUPPORT / "rolled_rows.py", tmp_path_factory.mktemp("on"))


def test_upstream_takes_labels_and_masks_of_neighbours_where_documents_are_padded(off: Any) -> None:
    assert off["decision"] == "disabled"
    assert off["rows"]["padded"]["wrong labels"] > 0
    for name in PADDED:
        assert off["rows"][name]["wrong masks"] > 0
        assert not off["rows"][name]["as each document alone"]
        assert off["rows"][name]["slope apart"] > 0.1
        assert off["losses"][name]["weights apart"] > 0.1


def test_upstream_does_so_on_two_context_parallel_ranks_and_raises_where_documents_are_short(off: Any) -> None:
    for rank in off["two ranks"]:
        assert rank["padded"]["wrong labels"] > 0
        assert rank["padded"]["loss"]["weights apart"] > 0.1
        assert rank["first alone padded"] == {"raised": "IndexError"}


def test_every_document_is_rolled_as_it_is_alone(on: tuple[str, Any]) -> None:
    _, found = on

    assert found["decision"] == "active", found["reason"]
    for row in found["rows"].values():
        assert row["as each document alone"]
        assert (row["wrong labels"], row["wrong masks"], row["slope apart"]) == (0, 0, 0.0)
        assert row["sums"] == [True, True]
        assert row["caller keeps its fields"]


def test_the_loss_and_its_gradients_are_those_of_each_document_s_own_labels(on: tuple[str, Any]) -> None:
    release, found = on

    losses = [*found["losses"].values(), *(row["loss"] for rank in found["two ranks"] for row in rank.values())]
    if release == WITHOUT_LOSS:
        assert losses == [None] * len(losses)
    else:
        assert max(each[key] for each in losses for key in ("weights apart", "activations apart")) < ROUNDING


def test_two_context_parallel_ranks_get_their_shares_of_the_row_that_is_rolled(on: tuple[str, Any]) -> None:
    _, found = on

    for rank in found["two ranks"]:
        assert [(row["wrong labels"], row["wrong masks"]) for row in rank.values()] == [(0, 0)] * 5


def test_pairs_of_ranks_with_other_numbers_of_documents_do_not_wait_for_each_other(on: tuple[str, Any]) -> None:
    _, found = on

    assert [len(rank["rows"]) for rank in found["two lanes"]] == [2, 2, 4, 4]
    for rank in found["two lanes"]:
        assert rank["together"] == 4
        assert {(row["wrong labels"], row["wrong masks"]) for row in rank["rows"].values()} == {(0, 0)}


def test_rows_without_padding_are_upstream_s_bit_for_bit(on: tuple[str, Any], off: Any) -> None:
    release, found = on

    assert found["not packed"] == off["not packed"]
    for name in AS_UPSTREAM:
        assert found["rows"][name]["bits"] == off["rows"][name]["bits"]
        if release != WITHOUT_LOSS:
            assert found["losses"][name]["bits"] == off["losses"][name]["bits"]
    for with_it, alone in zip(found["two lanes"], off["two lanes"], strict=True):
        for name in with_it["rows"].keys() & {*SHARED_AS_UPSTREAM}:
            assert with_it["rows"][name]["bits"] == alone["rows"][name]["bits"]


# In this process


module = stock(TARGET.module)


@pytest.fixture
def rolling(module: ModuleType) -> Iterator[ModuleType]:
    """The newest release with the seam."""
    (shape,) = OVERLAY.replacements
    with placed(OVERLAY, shape, module):
        yield module


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(module: ModuleType) -> None:
    assert_witness_and_self_test(OVERLAY, module, *OVERLAY.replacements)


def params(**fields: Any) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(qkv_format="thd", **fields)


def test_documents_end_at_padded_boundaries(rolling: ModuleType) -> None:
    padded = params(
        cu_seqlens_q=torch.tensor([0, 2, 4], dtype=torch.int32),
        cu_seqlens_q_padded=torch.tensor([0, 3, 6], dtype=torch.int32),
    )

    rolled, _ = rolling.roll_tensor(torch.arange(1, 7)[None], packed_seq_params=padded)

    assert rolled.tolist() == [[2, 3, 0, 5, 6, 0]]


def test_without_the_boundaries_that_upstream_asks_for_it_refuses_as_before(rolling: ModuleType) -> None:
    with pytest.raises(AssertionError, match="cu_seqlens_q"):
        rolling.roll_tensor(torch.arange(6)[None], packed_seq_params=params(cu_seqlens_q_padded=torch.tensor([0, 6])))


def test_nothing_is_rolled_to_nothing(rolling: ModuleType) -> None:
    assert rolling.roll_tensor(None, packed_seq_params=params()) == (None, None)
