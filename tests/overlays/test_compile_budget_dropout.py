"""Compiled models under an activation budget with the overlay: gradients belong to the random numbers of the forward pass."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from installed import python_of
from placed_seams import assert_same_bits, assert_self_test, placed, stock, without_overlays
from places import ROOT
from reproduced_pack import assert_repaired, reproduced_in
from torch.utils.checkpoint import checkpoint

from megacpp_overlays.feature_probes.compile_budget_dropout import CACHE, CACHED, DRAWN_AGAIN, TARGET
from megacpp_overlays.overlays.compile_budget_dropout import PARTS
from megacpp_overlays.repro import beside, neighbour

pytestmark = pytest.mark.upstream

FOLDER = ROOT / "packs/61-compile-budget-dropout"
PACK = beside(str(FOLDER / "neighbours.py"))
CUT, KEY = PARTS


@pytest.mark.parametrize("lane", ["current", "edge"])
def test_a_release_is_broken_without_the_overlay_and_right_with_it(lane: str) -> None:
    assert_repaired(reproduced_in(lane, "61"), parts=2)


CACHED_RUN = """
import megacpp_overlays
import torch
import torch._functorch.config
from torch._dynamo.utils import counters

torch._functorch.config.activation_memory_budget = 0.0
torch.manual_seed(61)
rows, weight = (torch.rand(64, 64).add(0.1).requires_grad_() for _ in range(2))
output = torch.compile(lambda rows, weight: torch.nn.functional.dropout((rows @ weight).relu(), 0.5))(rows, weight)
output.sum().backward()
right = rows.detach().T @ (2.0 * (output.detach() != 0))
print(bool((weight.grad - right).abs().max() < 1e-3 * right.abs().max()), counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.full  # Inductor compiles C++ for the CPU, which takes a minute
@pytest.mark.parametrize("lane", ["current", "edge"])
def test_a_graph_that_was_cached_without_the_overlay_is_not_loaded_with_it(lane: str, tmp_path: Path) -> None:
    python = python_of(lane)

    def run(**switched: str) -> str:
        path = {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        command = [python, "-W", "ignore", "-c", CACHED_RUN]
        return subprocess.run(
            command, env={**os.environ, **path, **switched}, stdout=subprocess.PIPE, check=True, text=True
        ).stdout.strip()

    off = {KEY.variable: "off"}
    assert [run(**off), run(**off), run(), run(), run(**off)] == ["False 0", "False 1", "True 0", "True 1", "False 1"]


# In this process


module = stock(TARGET.module)


@pytest.fixture
def repaired(module: ModuleType) -> Iterator[ModuleType]:
    """The compiled model with the seam."""
    with placed(CUT, DRAWN_AGAIN, module):
        yield module


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(module: ModuleType) -> None:
    assert_self_test(CUT, module, DRAWN_AGAIN)


def test_keys_of_cached_graphs_are_their_own(module: ModuleType) -> None:
    with without_overlays(CACHE.module) as cache:
        assert_self_test(KEY, cache, CACHED)


@pytest.mark.parametrize("each", neighbour.load(FOLDER), ids=lambda each: each.name)
def test_results_that_are_right_without_the_overlay_have_the_same_bits(
    each: neighbour.Neighbour, module: ModuleType
) -> None:
    assert_same_bits(each, CUT, module, DRAWN_AGAIN)


def two_layers(rows: Any, weight: Any) -> Any:
    """Dropout whose output is the input of a second one."""
    return PACK._dropout(PACK._dropout(rows, weight) + 0.1, weight)


def in_a_region(rows: Any, weight: Any) -> Any:
    """Dropout in a region that the model checkpoints."""
    return checkpoint(PACK._dropout, rows, weight, use_reentrant=False)


def beside_a_region(rows: Any, weight: Any) -> Any:
    """One dropout in a region that is checkpointed, and one outside."""
    return PACK._dropout(in_a_region(rows, weight) + 0.1, weight)


def of_several_kinds(rows: Any, weight: Any) -> Any:
    """Noise that is added, noise that multiplies, and a permutation."""
    hidden = (rows @ weight) * torch.rand_like(rows)
    hidden = hidden + torch.randn_like(hidden) * hidden
    return hidden[torch.randperm(hidden.shape[0])] * torch.empty_like(hidden).uniform_(0.5, 1.0)


@pytest.mark.parametrize("budget", [0.0, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(
    "function", [two_layers, in_a_region, beside_a_region, of_several_kinds], ids=lambda each: each.__name__
)
def test_gradients_are_those_of_the_output(repaired: ModuleType, function: Callable[..., Any], budget: float) -> None:
    """A loss along the gradient grows as the gradient says: numbers of the forward pass are drawn again with the same seed."""
    rows, weight = (each.detach().double().requires_grad_() for each in PACK.inputs())
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss_at(moved: Any) -> Any:
        torch.manual_seed(7)
        return compiled(rows, moved).sum()

    with PACK.compiling(budget):
        compiled = torch.compile(function, backend="aot_eager")
        loss_at(weight).backward()
        step = 1e-6
        grown = (loss_at(weight.detach() + step * direction) - loss_at(weight.detach() - step * direction)) / (2 * step)

    assert float((weight.grad * direction).sum()) == pytest.approx(float(grown.detach()), rel=1e-5)
