"""The benchmark of a whole training step, on a CPU: real Megatron-Core, tiny sizes, no overlay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import HANG_S, ROOT

pytestmark = [pytest.mark.upstream, pytest.mark.full]

WAYS = ["Megatron, unfused", "kernel, recompute", "kernel, keep"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Run it without Liger, whose kernels take their time in the interpreter; return the numbers and the page."""
    folder = tmp_path_factory.mktemp("step")
    page = folder / "page.md"
    options = ["--device", "cpu", "--quick", "--rounds", "3", "--steps", "3", "--largest-batch", "3", "--ways", *WAYS]
    script = str(ROOT / "benchmarks/linear_cross_entropy_step/run.py")
    command = [sys.executable, "-W", "ignore", script, *options, "--json", str(folder / "found.json")]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [*command, "--write", str(page)], env=variables, capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "found.json").read_text()), page


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


def test_a_step_is_timed_in_three_stages_beside_its_loss_alone(written: tuple[dict[str, Any], Path]) -> None:
    times = written[0]["times"]

    assert list(times) == [*WAYS, *(f"{way}, alone" for way in WAYS)]
    assert [len(times[way]["stages"]) for way in times] == [3] * len(WAYS) + [2] * len(WAYS)


def test_the_page_is_made_again_from_the_numbers_without_torch(
    written: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    again = tmp_path / "again.md"
    script = ROOT / "benchmarks/linear_cross_entropy_step/page.py"
    command = [sys.executable, "-S", str(script), str(written[1].with_name("found.json")), "--write", str(again)]
    subprocess.run(command, check=True, capture_output=True, timeout=HANG_S)

    assert again.read_text() == written[1].read_text()
    rows = [line for line in again.read_text().splitlines() if line.startswith("| kernel, keep |")]
    assert rows[0].endswith("| >= 3 |")
    assert rows[1].endswith("| right |")
