"""Megatron-FSDP with the overlay: with a sharded optimizer layers that add gradients to the buffer themselves add those of all microbatches.

Cases of pack 71 run on releases, each in a process of its own. Further tests call the method in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from placed_seams import assert_self_test, placed, stock
from releases import newest
from reproduced_pack import assert_repaired, measured_on

from megacpp_overlays.feature_probes.fsdp_fused_accumulation import CLASS, METHOD, OVERWRITTEN, TARGET
from megacpp_overlays.overlays import fsdp_fused_accumulation
from megacpp_overlays.overlays.fsdp_fused_accumulation import OVERLAY

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore::UserWarning")]

NEWEST = newest()
measured = measured_on("71", "0.18.2", NEWEST, daily=[NEWEST])
module = stock(TARGET.module)


def test_a_release_is_broken_without_the_overlay_and_right_with_it(measured: Any) -> None:
    assert_repaired(measured)


def test_the_self_test_sees_the_defect_and_its_absence(module: ModuleType) -> None:
    assert_self_test(OVERLAY, module, OVERWRITTEN)


@pytest.fixture
def gathered(module: ModuleType) -> Any:
    """Return, with the seam, whether a layer writes over the gradient of each of its weights once they are gathered."""

    def ask(strategy: str, hand_over: Callable[[list[Any]], Any] = list, *, passes: int = 1) -> list[bool]:
        weights = [torch.empty(0), torch.empty(0)]
        for _ in range(passes):
            getattr(getattr(module, CLASS), METHOD)(
                fsdp_fused_accumulation._whole(strategy), hand_over(weights), wait_bucket_ready=False
            )
        return [getattr(each, "overwrite_main_grad", False) for each in weights]

    with placed(OVERLAY, OVERWRITTEN, module):
        yield ask


@pytest.mark.parametrize("passes", [1, 2])
def test_with_a_sharded_optimizer_gradients_are_added(gathered: Callable[..., Any], passes: int) -> None:
    assert gathered("optim", passes=passes) == [False, False]


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_sharded_gradients_are_written_over(gathered: Callable[..., Any], strategy: str) -> None:
    assert gathered(strategy) == [True, True]


def test_weights_may_come_from_an_iterator(gathered: Callable[..., Any]) -> None:
    assert gathered("optim", iter) == [False, False]
