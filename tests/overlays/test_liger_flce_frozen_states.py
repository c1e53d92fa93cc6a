"""Liger's fused linear cross entropy with the overlay: an output layer learns from hidden states that want no gradient.

The case and the neighbours of pack 58 run on releases, each in a process of its own. Further tests call the seams in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from liger_releases import Releases
from placed_seams import placed, without_overlays
from releases import daily, newest
from reproduced_pack import assert_repaired

from megacpp_overlays.feature_probes.liger_flce_frozen_states import FUNCTION, MODULE, SKIPPED
from megacpp_overlays.loader import probing
from megacpp_overlays.model import Overlay, Verdict
from megacpp_overlays.overlays.liger_flce_frozen_states import PARTS
from megacpp_overlays.source.file_trees import DirectoryTree

NEWEST = newest("liger-kernel")
RELEASES = ("0.6.5", "0.7.0", "0.8.1", "0.8.2", NEWEST)
RIGHT = ("0.5.8", "0.6.2")


@pytest.fixture(scope="module")
def releases(wheel: Callable[[str, str], Path]) -> Releases:
    pytest.importorskip("triton")
    return Releases(wheel, "reproduced.py")


@pytest.mark.parametrize("version", daily(*RELEASES))
def test_a_release_is_broken_without_the_overlay_and_right_with_it(
    releases: Releases, run_python: Callable[..., Any], version: str
) -> None:
    measured = releases.reproduced(run_python, version, "58")

    assert_repaired(measured, parts=2)


@pytest.mark.parametrize("version", RIGHT)
def test_it_is_absent_where_nothing_is_skipped(wheel: Callable[[str, str], Path], version: str) -> None:
    from unpacked import unpacked

    tree = DirectoryTree(unpacked(wheel("liger-kernel", version)))

    assert {probing.examine(part, tree).verdict for part in PARTS} == {Verdict.ABSENT}


# In this process: which hidden states reach the loss


Reached = Callable[..., Any]


@pytest.fixture(params=PARTS, ids=["function", "module"])
def reached(request: pytest.FixtureRequest) -> Any:
    """Return a caller with its seam, which gives back the hidden states that it hands over."""
    part: Overlay = request.param
    with (
        without_overlays(part.target.module) as module,
        placed(part, SKIPPED, module),
        pytest.MonkeyPatch.context() as patched,
    ):
        handed: list[Any] = []

        def apply(states: Any, *_: Any) -> tuple[None, ...]:
            handed.append(states)
            return (None,) * 4

        patched.setattr(module, "LigerFusedLinearCrossEntropyFunction", SimpleNamespace(apply=apply))

        def call(states: Any, weight: Any, bias: Any = None, reduction: str = "mean") -> Any:
            labels = torch.zeros(1, dtype=torch.int64)
            _call(module, part, states, weight, labels, bias, reduction)
            return handed.pop()

        yield call


def _call(module: ModuleType, part: Overlay, states: Any, weight: Any, labels: Any, bias: Any, reduction: str) -> None:
    if part.target == FUNCTION:
        module.liger_fused_linear_cross_entropy(states, weight, labels, bias=bias, reduction=reduction)
    else:
        module.LigerFusedLinearCrossEntropyLoss(reduction=reduction)(weight, states, labels, bias)


def frozen() -> torch.Tensor:
    return torch.ones(1, 2)


def learning() -> torch.Tensor:
    return torch.ones(3, 2).requires_grad_()


def test_a_layer_that_learns_alone_gets_hidden_states_that_need_a_gradient(reached: Reached) -> None:
    states = frozen()

    for layer in ({"weight": learning()}, {"weight": torch.ones(3, 2), "bias": torch.ones(3).requires_grad_()}):
        found = reached(states, **layer)
        assert found.requires_grad
        assert found.data_ptr() == states.data_ptr()
    assert not states.requires_grad


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_inference_tensors_are_copied(reached: Reached, reduction: str) -> None:
    with torch.inference_mode():
        states = frozen()

    assert reached(states, learning(), reduction=reduction).requires_grad


def test_evaluation_losses_of_tokens_and_layers_that_do_not_learn_are_upstream_s(reached: Reached) -> None:
    states = frozen()

    assert reached(states, torch.ones(3, 2)) is states
    assert reached(states, learning(), reduction="none") is states
    with torch.no_grad():
        assert reached(states, learning()) is states
    wanted = frozen().requires_grad_()
    assert reached(wanted, learning()) is wanted


@pytest.mark.parametrize("part", PARTS, ids=["function", "module"])
def test_the_self_test_sees_whether_the_seam_is_in(part: Overlay) -> None:
    assert part.self_test is not None
    with without_overlays(part.target.module) as module:
        assert part.self_test(module).broken
        with placed(part, SKIPPED, module):
            assert not part.self_test(module).broken


def test_both_callers_are_parts() -> None:
    assert [part.target for part in PARTS] == [FUNCTION, MODULE]
