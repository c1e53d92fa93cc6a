"""Optimizers with the overlay: experts of all tensor parallel ranks are in the gradient norm, where ranks do not share them.

Cases of pack 55 run on releases, each in a process of its own. Further tests call both functions in this process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from placed_seams import assert_self_test, placed, stock
from reproduced_pack import assert_repaired, measured_on

from megacpp_overlays.feature_probes.expert_grad_norm import BY_LAYER, COPY, TARGET, TEST
from megacpp_overlays.overlays.expert_grad_norm import OVERLAY

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore::UserWarning")]

BROKEN = "0.18.2"
EXPERT, LAYER = SimpleNamespace(allreduce=False), SimpleNamespace(allreduce=True)
measured = measured_on("55", "0.12.0", "0.15.3", "0.16.1", BROKEN, daily=[BROKEN])


def group(rank: int) -> Any:
    """A group in which this process has a rank."""
    return SimpleNamespace(rank=lambda: rank)


def test_a_release_is_broken_without_the_overlay_and_right_with_it(measured: Any) -> None:
    assert_repaired(measured)


# In this process: the functions of the newest release, which give the same answers as those of 0.18.2


module = stock(TARGET.module)


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    """Make this process the second of two ranks, with the given number of ranks to an expert, and return the group of both."""
    found = importlib.import_module("megatron.core.parallel_state")

    def of(sharing: int) -> Any:
        own = group(1)
        monkeypatch.setattr(found, "get_tensor_model_parallel_group", lambda check_initialized=True: own)
        monkeypatch.setattr(found, "get_expert_tensor_parallel_world_size", lambda: sharing)
        return own

    return of


@pytest.fixture
def repaired(module: ModuleType) -> Iterator[ModuleType]:
    """The newest release with the seams."""
    with placed(OVERLAY, BY_LAYER, module):
        yield module


def test_the_self_test_sees_whether_copies_are_known(module: ModuleType) -> None:
    assert_self_test(OVERLAY, module, BY_LAYER)


@pytest.mark.parametrize(
    ("param", "sharing", "counts"),
    [(EXPERT, 1, True), (EXPERT, 2, False), (LAYER, 1, False), (SimpleNamespace(), 1, False)],
    ids=["one rank's expert", "an expert that ranks share", "a layer", "anything else"],
)
def test_an_expert_counts_on_every_rank_where_ranks_do_not_share_it(
    repaired: ModuleType, states: Callable[[int], Any], param: Any, sharing: int, counts: bool
) -> None:
    own = states(sharing)

    assert getattr(repaired, TEST)(param, own) is counts
    assert getattr(repaired, TEST)(param, tp_group=own) is counts


@pytest.mark.parametrize(("rank", "counts"), [(0, True), (1, False)])
def test_a_group_that_a_caller_made_is_upstreams_to_judge(
    repaired: ModuleType, states: Callable[[int], Any], rank: int, counts: bool
) -> None:
    states(1)

    assert getattr(repaired, TEST)(EXPERT, group(rank)) is counts


def test_a_parameter_that_says_that_it_is_a_part_counts_as_before(
    repaired: ModuleType, states: Callable[[int], Any]
) -> None:
    own = states(2)

    assert getattr(repaired, TEST)(SimpleNamespace(allreduce=False, tensor_model_parallel=True), own) is True


@pytest.mark.parametrize(("source", "known"), [(EXPERT, True), (LAYER, False), (SimpleNamespace(), False)])
def test_only_a_copy_of_an_expert_gets_the_flag(repaired: ModuleType, source: Any, known: bool) -> None:
    copied = SimpleNamespace()

    getattr(repaired, COPY)(copied, source)

    assert hasattr(copied, "allreduce") is known


def test_a_flag_that_a_copy_has_already_stays(repaired: ModuleType) -> None:
    copied = SimpleNamespace(allreduce=True)

    getattr(repaired, COPY)(copied, EXPERT)

    assert copied.allreduce is True
