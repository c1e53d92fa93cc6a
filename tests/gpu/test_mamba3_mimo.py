"""Mamba-3's MIMO backward with upstream's own kernels and any number of groups.

Needs mamba-ssm 2.3.2.post1, tilelang 0.1.8 and einops. Everything is measured once, in a fresh interpreter that imports
megacpp_overlays first, as a launcher does; MEGACPP_MIMO_JSON names a file that keeps the numbers.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import HANG_S, SUPPORT

pytestmark = [pytest.mark.gpu, pytest.mark.upstream]

NUMBERS = SUPPORT / "mamba3_mimo_numbers.py"
GROUPS = ("1", "2", "4", "8")
MIDDLE = GROUPS[1:-1]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    if any(importlib.util.find_spec(name) is None for name in ("mamba_ssm", "tilelang", "einops")):
        pytest.skip("needs mamba-ssm, tilelang and einops")
    command = [sys.executable, "-W", "ignore", str(NUMBERS), *arguments]
    env = {**os.environ, "MEGACPP_OVERLAYS_LOG": "logging", **variables}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=HANG_S, check=False)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = Path(os.environ.get("MEGACPP_MIMO_JSON", tmp_path_factory.mktemp("mimo") / "numbers.json"))
    done = run("--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("kind", ["plain", "packed"])
@pytest.mark.parametrize("groups", GROUPS)
def test_gradients_are_as_near_to_float64_as_those_of_one_group_and_of_all(
    kind: str, groups: str, numbers: dict[str, Any]
) -> None:
    assert numbers["problems"][kind][groups] == []


@pytest.mark.parametrize("kind", ["plain", "packed"])
@pytest.mark.parametrize("groups", GROUPS)
def test_gradients_are_the_same_bits_on_every_run(kind: str, groups: str, numbers: dict[str, Any]) -> None:
    assert numbers["accuracy"][kind][groups]["unsteady"] == []


@pytest.mark.parametrize("groups", GROUPS)
def test_a_model_trains_for_twenty_steps(groups: str, numbers: dict[str, Any]) -> None:
    losses = numbers["losses"][groups]

    assert len(losses) == 20
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("groups", MIDDLE)
def test_a_pass_is_captured_into_a_graph_as_far_as_upstreams_is(groups: str, numbers: dict[str, Any]) -> None:
    graphs = numbers["graphs"]
    if {graphs["1"], graphs["8"]} != {"same bits"}:
        pytest.skip(f"upstream's own: {graphs}")

    assert graphs[groups] == "same bits"


def test_groups_between_cost_little_more_than_a_group_for_each_head(numbers: dict[str, Any]) -> None:
    found = numbers["throughput"]
    ratios = found.get("graph", found["call"])["throughput_ratio"]

    assert min(ratios[groups] for groups in ("4", "8", "16")) > 0.8
