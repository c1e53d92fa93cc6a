"""Pack 11 on a GPU: a hybrid model with Mamba layers trains with the fused loss, both overlays on, as with the plain one.

Every tree given with `--upstream-tree` whose hybrid model is not wired; without one there is nothing to train. The Mamba
layers are upstream's own, over mamba-ssm's Triton kernels.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import HANG_S, ROOT, SUPPORT

from megacpp_overlays.feature_probes import hybrid_linear_ce as feature
from megacpp_overlays.source.file_trees import DirectoryTree

pytestmark = pytest.mark.gpu

OPTION = "--upstream-tree"
TESTS = SUPPORT

LOSS = 1e-5
"""Relative error of fused losses against logits in float32: both add bf16 products in float32, in other orders."""
MEAN, WORST, FLOOR = 1.25, 2.0, 2e-3
"""How much further from the truth than the plain model's a gradient may be, on average and at worst: the layers below round
both to bfloat16, in different directions. The floor is half a unit of bfloat16."""
APART = 0.02
"""How far two trainings from one seed may be apart in a loss that starts near 12: the rounding of the weights to bfloat16
after each step, which is a flip of the last of 8 bits wherever a gradient differs at all, over 20 steps."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = {path.resolve().name: path.resolve() for path in metafunc.config.getoption(OPTION)}
    chosen = {
        name: path
        for name, path in given.items()
        if feature.probe(DirectoryTree(path)).shape == feature.PLAIN_OUTPUT_LAYER
    }
    metafunc.parametrize("hybrid", list(chosen.values()), ids=list(chosen), scope="module")


@functools.cache
def training(hybrid: Path) -> dict[str, Any]:
    """Return the results of `hybrid_training.py`; also write them to the file that HYBRID_RESULTS names."""
    path = os.pathsep.join([str(hybrid), str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "MEGACPP_OVERLAYS_LOG": "logging", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(TESTS / "hybrid_training.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout)
    if kept := os.environ.get("HYBRID_RESULTS"):
        Path(kept).write_text(json.dumps(found, indent=1))
    return found


@pytest.fixture
def lockstep(hybrid: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = training(hybrid)["lockstep"]
    return found


def test_both_overlays_are_active_and_the_layers_are_mamba_s_own(hybrid: Path) -> None:
    found = training(hybrid)

    assert set(found["decisions"].values()) == {"active"}, found["decisions"]
    assert {"MambaMixer", "SelfAttention", "MLP", feature.LAYER} <= set(found["layers"])


def test_at_the_same_weights_the_fused_loss_is_that_of_float32_logits(
    lockstep: dict[str, list[dict[str, Any]]],
) -> None:
    for pattern, steps in lockstep.items():
        for step in steps:
            assert step["fused"]["losses"] < LOSS, (pattern, step)
            assert step["fused"]["losses"] <= step["plain"]["losses"], (pattern, step)


def test_at_the_same_weights_gradients_are_no_further_from_the_truth(
    lockstep: dict[str, list[dict[str, Any]]],
) -> None:
    for pattern, steps in lockstep.items():
        for step in steps:
            fused, plain = step["fused"], step["plain"]
            assert fused["mean gradient"] <= MEAN * plain["mean gradient"] + FLOOR, (pattern, step)
            assert fused["worst gradient"] <= WORST * plain["worst gradient"] + FLOOR, (pattern, step)


def test_both_learn_alike(hybrid: Path) -> None:
    found = training(hybrid)["alone"]
    fused, plain = found["fused"]["losses"], found["plain"]["losses"]

    assert len(fused) == len(plain) == training(hybrid)["request"]["steps"]
    assert all(map(math.isfinite, fused))
    assert fused[-1] < fused[0] - 0.5
    assert max(abs(one - other) for one, other in zip(fused, plain, strict=True)) < APART


def test_the_logits_are_not_kept(hybrid: Path) -> None:
    found = training(hybrid)
    request = found["request"]
    logits = request["sequence"] * request["batch"] * request["vocabulary"] * 2 / 2**20

    assert found["alone"]["plain"]["peak MiB"] - found["alone"]["fused"]["peak MiB"] > logits
