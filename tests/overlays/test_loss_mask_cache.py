"""GPT datasets with the overlay: every label that is no padding has a loss, independent of earlier samples.

Cases of pack 49 run on releases, in a process of its own for each; everything else runs on the newest one in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from placed_seams import assert_same_bits, assert_self_test, placed, stock
from places import ROOT
from releases import newest
from reproduced_pack import assert_repaired, measured_on

from megacpp_overlays.feature_probes.loss_mask_cache import EVERY, FIRST, TARGET
from megacpp_overlays.overlays.loss_mask_cache import OVERLAY
from megacpp_overlays.repro import beside, neighbour

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore:Could not determine rank:UserWarning")]

FOLDER = ROOT / "packs/49-loss-mask-cache"
PACK = beside(str(FOLDER / "neighbours.py"))
ORDERS = st.lists(st.none() | st.integers(0, len(PACK.DOCUMENTS) - 1), min_size=1, max_size=6)


measured = measured_on("49", "0.12.0", "0.14.0", "0.16.1", newest())


def test_a_release_is_broken_without_the_overlay_and_right_with_it(measured: Any) -> None:
    assert_repaired(measured)


# In this process


module = stock(TARGET.module)


@pytest.fixture(scope="module", params=[FIRST, EVERY])
def caching(request: pytest.FixtureRequest, module: ModuleType) -> Iterator[ModuleType]:
    """The newest release with the seam of one shape."""
    with placed(OVERLAY, request.param, module):
        yield module


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(module: ModuleType) -> None:
    assert_self_test(OVERLAY, module, FIRST, EVERY)


def test_the_newest_release_is_broken_without_the_overlay(module: ModuleType) -> None:
    assert all(case.run().broken for case in PACK.CASES)


def test_the_newest_release_is_right_with_the_overlay(caching: ModuleType) -> None:
    assert not any(case.run().broken for case in PACK.CASES)


@pytest.mark.parametrize("each", neighbour.load(FOLDER), ids=lambda each: each.name)
def test_results_that_are_right_without_the_overlay_have_the_same_bits(
    each: neighbour.Neighbour, module: ModuleType
) -> None:
    assert_same_bits(each, OVERLAY, module, FIRST, EVERY)


@given(order=ORDERS)
def test_every_label_that_is_no_padding_has_a_loss(caching: ModuleType, order: list[int | None]) -> None:
    for each, sample in zip(order, PACK.served(order), strict=True):
        assert sample["loss_mask"].sum() == (0 if each is None else PACK.COUNTED[each])
        assert each is None or torch.equal(sample["loss_mask"] > 0, sample["labels"] > 0)


def test_a_write_to_the_mask_of_one_sample_is_not_seen_in_another(caching: ModuleType, tmp_path: Path) -> None:
    data = PACK.dataset(tmp_path)
    for _ in range(2):
        for each, counted in enumerate(PACK.COUNTED):
            mask = data[each]["loss_mask"]
            assert mask.sum() == counted
            mask.zero_()


def test_a_cache_that_the_caller_filled_is_used_as_it_is(caching: ModuleType, tmp_path: Path) -> None:
    data = PACK.dataset(tmp_path)
    mask = torch.arange(PACK.LENGTH).float()
    data.cached_loss_mask, data.masks_and_position_ids_are_cached = mask, True

    first, second = (data[PACK.FIRST_CLEAN]["loss_mask"] for _ in range(2))

    assert data.cached_loss_mask is mask
    assert first.tolist() == second.tolist() == [*range(PACK.LENGTH - 1), 0]


def test_an_error_leaves_a_whole_cache(caching: ModuleType, tmp_path: Path) -> None:
    data = PACK.dataset(tmp_path)
    asked = {key: value for key, value in vars(data.config).items() if key != "inter_document_masking"}
    data.config = SimpleNamespace(**asked)

    for each in (PACK.PADDED_TAIL, PACK.PADDED_MIDDLE):
        with pytest.raises(AttributeError):
            data[each]
        assert data.cached_loss_mask.sum() == PACK.LENGTH
