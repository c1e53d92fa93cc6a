"""Experts with a tensor parallel size of their own with the overlay: their gradients are reduced over ranks that hold the same.

The case and the neighbours of pack 64 run on releases, in processes of their own; the newest one is repaired, and its method takes the seam as well.
"""

from __future__ import annotations

import os
import subprocess
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from installed import python_of
from placed_seams import assert_self_test, placed, stock
from places import ROOT
from reproduced_pack import assert_repaired, measured_on

from megacpp_overlays.feature_probes.expert_gradient_groups import CLASS, TARGET, UNMARKED
from megacpp_overlays.overlays.expert_gradient_groups import OVERLAY

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore")]

SIZES = st.sampled_from([1, 2, 4, 8])


measured = measured_on("64", "0.13.1", "0.15.3", "0.16.1", "0.18.2")


def test_a_release_is_broken_without_the_overlay_and_right_with_it(measured: Any) -> None:
    assert_repaired(measured)


def test_results_that_are_right_without_the_overlay_have_the_same_bits() -> None:
    command = [python_of("summer-2026"), "-W", "ignore", "-m", "megacpp_overlays", "repro", "64"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout
    assert done.stdout.count(": the same bits, ") == 6, done.stdout
    assert "FIX_VALIDATED" in done.stdout


# In this process


module = stock(TARGET.module)


def test_the_self_test_sees_the_defect_and_its_absence(module: ModuleType) -> None:
    assert_self_test(OVERLAY, module, UNMARKED)


@given(
    of_layers=SIZES, of_experts=SIZES, groups=SIZES, number=st.integers(1, 99), was=st.sampled_from([None, True, False])
)
def test_experts_alone_are_marked_and_where_upstream_does_not(
    module: ModuleType, of_layers: int, of_experts: int, groups: int, number: int, was: bool | None
) -> None:
    numbers: list[int] = []
    experts, shared = (torch.nn.Linear(1, 1) for _ in range(2))
    for each in (*experts.parameters(), *shared.parameters()):
        vars(each).update({} if was is None else {"allreduce": was})
    config = SimpleNamespace(
        tensor_model_parallel_size=of_layers, expert_tensor_parallel_size=of_experts, expert_model_parallel_size=groups
    )
    router = SimpleNamespace(set_layer_number=numbers.append)
    layer = SimpleNamespace(config=config, router=router, experts=experts, shared_experts=shared)

    with placed(OVERLAY, UNMARKED, module):
        getattr(module, CLASS).set_layer_number(layer, number)

    marked = False if groups == 1 and of_experts != of_layers else was
    assert [getattr(each, "allreduce", None) for each in experts.parameters()] == [marked] * 2
    assert [getattr(each, "allreduce", None) for each in shared.parameters()] == [was] * 2
    assert (numbers, layer.layer_number) == ([number], number)
