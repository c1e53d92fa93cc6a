"""Layer-wise optimizers with the overlay: biases of all experts are in the gradient norm, and zeros are counted in them.

Cases of pack 54 run on releases, each in a process of its own. Further tests call the constructor in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from placed_seams import assert_self_test, placed, stock
from releases import newest
from reproduced_pack import assert_repaired, measured_on

from megacpp_overlays.feature_probes.layerwise_norm_groups import CLASS, NO_GROUPS, TARGET
from megacpp_overlays.overlays.layerwise_norm_groups import OVERLAY

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore::UserWarning")]

CONFIG = SimpleNamespace(overlap_param_gather=False, bf16=False)
GROUPS = SimpleNamespace(tp="of layers", expt_tp="of experts")
measured = measured_on("54", "0.19.0", newest(), daily=[newest()])


def test_a_release_is_broken_without_the_overlay_and_right_with_it(measured: Any) -> None:
    assert_repaired(measured)


# In this process


module = stock(TARGET.module)


@pytest.fixture
def repaired(module: ModuleType) -> Iterator[ModuleType]:
    """The newest release with the seams."""
    with placed(OVERLAY, NO_GROUPS, module):
        yield module


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(module: ModuleType) -> None:
    assert_self_test(OVERLAY, module, NO_GROUPS)


def made(module: ModuleType, groups: Any, **attributes: Any) -> tuple[Any, Any]:
    """Return a layer-wise optimizer, and the child with these attributes that it is made of."""
    child = SimpleNamespace(config=CONFIG, param_groups=[], **attributes)
    return getattr(module, CLASS)([child], CONFIG, groups), child


def test_the_optimizer_and_its_children_have_both_groups(repaired: ModuleType) -> None:
    for each in made(repaired, GROUPS):
        assert (each.tp_group, each.expert_tp_group) == (GROUPS.tp, GROUPS.expt_tp)


def test_groups_that_a_caller_has_set_stay(repaired: ModuleType) -> None:
    _, child = made(repaired, GROUPS, tp_group="a caller's", expert_tp_group="a caller's")

    assert (child.tp_group, child.expert_tp_group) == ("a caller's", "a caller's")


def test_without_a_group_of_experts_that_of_layers_is_theirs(repaired: ModuleType) -> None:
    """As `get_megatron_optimizer` does for all other optimizers."""
    assert made(repaired, SimpleNamespace(tp="of layers"))[1].expert_tp_group == "of layers"


def test_without_groups_none_is_made_up(repaired: ModuleType) -> None:
    optimizer, child = made(repaired, None)

    assert [each.expert_tp_group for each in (optimizer, child)] == [None, None]
