"""The benchmark of a whole training step, on a CPU: real Megatron-Core, tiny sizes, no overlay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import page_without_torch, run_quickly
from places import ROOT

pytestmark = [pytest.mark.upstream, pytest.mark.full]

FOLDER = ROOT / "benchmarks/linear_cross_entropy_step"
WAYS = ["Megatron, unfused", "kernel, recompute", "kernel, keep"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Run it without Liger, whose kernels take their time in the interpreter; return the numbers and the page."""
    options = ["--rounds", "3", "--steps", "3", "--largest-batch", "3", "--ways", *WAYS]
    folder = run_quickly(FOLDER, tmp_path_factory.mktemp("step"), *options)
    return json.loads((folder / "found.json").read_text()), folder / "page.md"


def test_every_way_finds_the_same_loss_and_right_gradients(written: tuple[dict[str, Any], Path]) -> None:
    agreement = written[0]["agreement"]

    assert list(agreement) == ["float64", *WAYS]
    for way in WAYS:
        assert agreement[way]["loss"] == pytest.approx(agreement["float64"]["loss"], rel=1e-3)
        assert max(agreement[way]["dX"], agreement[way]["dW"]) < 0.01


def test_the_trajectories_of_all_ways_stay_together_and_fall(written: tuple[dict[str, Any], Path]) -> None:
    trajectory = written[0]["trajectory"]

    for way in WAYS:
        assert trajectory[way] == pytest.approx(trajectory[WAYS[0]], rel=2e-3)
        assert trajectory[way] == sorted(trajectory[way], reverse=True)


def test_a_step_is_timed_in_three_stages_and_with_its_loss_alone(written: tuple[dict[str, Any], Path]) -> None:
    times = written[0]["times"]

    assert list(times) == [*WAYS, *(f"{way}, alone" for way in WAYS)]
    assert [len(times[way]["stages"]) for way in times] == [3] * len(WAYS) + [2] * len(WAYS)


def test_the_page_is_made_again_from_the_numbers_without_torch(
    written: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    again = page_without_torch(FOLDER, written[1].parent, tmp_path / "again.md")

    assert again == written[1].read_text()
    rows = [line for line in again.splitlines() if line.startswith("| kernel, keep |")]
    assert rows[0].endswith("| >= 3 |")
    assert rows[1].endswith("| right |")
