"""The benchmark of sparse attention on context-parallel ranks, on a CPU: two ranks over gloo, a real layer of Megatron, tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import page_without_torch, run_quickly
from places import ROOT

pytestmark = [pytest.mark.upstream, pytest.mark.full]

FOLDER = ROOT / "benchmarks/dsa_ranks"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the benchmark; return the folder of its output."""
    return run_quickly(FOLDER, tmp_path_factory.mktemp("dsa"), "--sizes", "1", "2")


@pytest.fixture
def found(written: Path) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((written / "found.json").read_text())
    return kept


def test_gradients_of_two_ranks_are_those_of_one(found: dict[str, Any]) -> None:
    gradients = found["ranks"]["2"]["gradients"]

    assert max(gradients["float32"]["ranks"].values()) < 1e-5
    assert max(gradients["bfloat16"]["ranks"].values()) < 2e-2
    assert len(gradients["float32"]["ranks"]) == 14


def test_two_ranks_learn_the_same_as_one(found: dict[str, Any]) -> None:
    (one,), (two,) = (found["ranks"][ranks]["runs"] for ranks in ("1", "2"))

    assert two["losses"] == pytest.approx(one["losses"], rel=1e-2)
    assert two["losses"][-1] < two["losses"][0]


def test_the_page_is_made_again_from_the_numbers_without_torch(written: Path, tmp_path: Path) -> None:
    assert page_without_torch(FOLDER, written, tmp_path / "page.md") == (written / "page.md").read_text()
