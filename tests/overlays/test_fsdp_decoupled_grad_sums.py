"""Megatron-FSDP for a precision-aware optimizer with the overlay: gradients of replicas are summed over tensor parallel ranks.

The case of pack 66 runs on releases, each in a process of its own. Further tests call the function in this process.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from placed_seams import assert_self_test, placed, stock
from releases import newest
from reproduced_pack import assert_repaired, measured_on

from megacpp_overlays.feature_probes.fsdp_decoupled_grad_sums import OVERLOOKED, TARGET
from megacpp_overlays.overlays.fsdp_decoupled_grad_sums import OVERLAY

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore::UserWarning")]

NEWEST = newest()
measured = measured_on("66", "0.18.2", NEWEST, daily=[NEWEST])
module = stock(TARGET.module)


def test_a_release_is_broken_without_the_overlay_and_right_with_it(measured: Any) -> None:
    assert_repaired(measured)


def test_the_self_test_sees_the_defect_and_its_absence(module: ModuleType) -> None:
    assert_self_test(OVERLAY, module, OVERLOOKED)


@pytest.mark.parametrize(
    ("attributes", "right"),
    [
        ({"__fsdp_param__": True, "decoupled_grad": torch.ones(1)}, "decoupled_grad"),
        ({"__fsdp_param__": True, "decoupled_grad": None}, "grad"),
        ({"__fsdp_param__": True}, "grad"),
        ({"__fsdp_param__": False, "decoupled_grad": torch.ones(1)}, "grad"),
        ({"decoupled_grad": torch.ones(1)}, "grad"),
        ({"main_grad": torch.ones(1)}, "main_grad"),
    ],
    ids=["kept-for-the-optimizer", "none-on-this-rank", "usual", "let-go-by-fsdp", "of-the-optimizer", "of-ddp"],
)
def test_gradients_are_where_the_wrapper_of_a_parameter_has_them(
    module: ModuleType, attributes: dict[str, Any], right: str
) -> None:
    with placed(OVERLAY, OVERLOOKED, module):
        assert getattr(module, TARGET.symbol)(SimpleNamespace(grad=None, **attributes)) == right
