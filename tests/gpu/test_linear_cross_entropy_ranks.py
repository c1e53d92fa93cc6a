"""The vocabulary-parallel loss over NCCL: right against one GPU and float64, also in a CUDA graph with its collectives.

The benchmark's own sections, at sizes that are no multiple of anything that the kernels like.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from places import HANG_S, ROOT

pytestmark = pytest.mark.gpu

SHAPE = "1028x520x12004"
SEQUENCE = ", sequence parallel"
METHODS = ["recompute", "recompute, masked tokens skipped", "keep", "keep, masked tokens skipped"]
WAYS = [f"{method}{way}" for method in METHODS for way in ("", SEQUENCE)]
ROUNDING = {"bfloat16": 8e-3, "float32": 1e-4}
"""Allowed difference of sums in another order, and in bfloat16 of a result that is rounded once more."""


@pytest.fixture(
    scope="module", params=[(2, "bfloat16"), (2, "float32"), (4, "bfloat16")], ids=lambda each: "-".join(map(str, each))
)
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of the ranks of one launch."""
    import torch

    size, dtype = request.param
    if torch.cuda.device_count() < size:
        pytest.skip(f"{torch.cuda.device_count()} of {size} CUDA devices")
    kept = tmp_path_factory.mktemp("ranks") / "found.json"
    options = ["--sizes", str(size), "--shape", SHAPE, "--dtype", dtype, "--rounds", "1", "--json", str(kept)]
    script = ROOT / "benchmarks/linear_cross_entropy_ranks/run.py"
    command = [sys.executable, str(script), *options, "--sections", "correctness", "options", "graphs"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {"size": size, "rounding": ROUNDING[dtype], **json.loads(kept.read_text())["sizes"][str(size)]}


def rows(launched: dict[str, Any], section: str) -> list[dict[str, Any]]:
    found = [row for row in launched[section] if not row["name"].startswith("TP=1,")]
    assert [row["name"] for row in found] == [f"TP={launched['size']}, {way}" for way in WAYS]
    return found


def test_losses_and_gradients_are_those_of_one_gpu(launched: dict[str, Any]) -> None:
    for row in rows(launched, "correctness") + rows(launched, "options"):
        assert max(row["one_gpu"].values()) < launched["rounding"], row


def test_no_error_against_float64_is_worse_than_that_of_one_gpu(launched: dict[str, Any]) -> None:
    alone = {row["name"]: row["float64"] for row in launched["correctness"]}

    for row in rows(launched, "correctness"):
        one = alone[f"TP=1, {row['name'].partition(', ')[2].removesuffix(SEQUENCE)}"]
        for name, error in row["float64"].items():
            assert error < 1.1 * one[name] + 1e-6, row


def test_all_ranks_have_the_same_loss_and_a_second_run_the_same_bits(launched: dict[str, Any]) -> None:
    for row in rows(launched, "correctness"):
        assert row["same_loss_everywhere"], row
        assert row["same_bits_again"], row


def test_a_captured_step_replays_on_other_inputs_as_it_runs_outside(launched: dict[str, Any]) -> None:
    for row in rows(launched, "graphs"):
        # Four ranks may add up in another order where NCCL chooses another way for buffers of a graph.
        assert row["same_bits"] or (launched["size"] > 2 and max(row["apart"].values()) < launched["rounding"]), row
