"""The benchmark of the vocabulary-parallel loss, on a CPU: every line of it runs, and its page shows its results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import page_without_torch, run_quickly
from places import HANG_S, ROOT

pytestmark = pytest.mark.full

FOLDER = ROOT / "benchmarks/linear_cross_entropy_ranks"
SKIPPED, SEQUENCE = ", masked tokens skipped", ", sequence parallel"
METHODS = ["recompute", f"recompute{SKIPPED}", "keep", f"keep{SKIPPED}"]
WAYS = [f"{method}{way}" for method in METHODS for way in ("", SEQUENCE)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Run it with two ranks, and with three, over which the sizes cannot be spread; return the numbers and the page."""
    options = ["--rounds", "1", "--sizes", "2", "3", "--dtype", "float32"]
    folder = run_quickly(FOLDER, tmp_path_factory.mktemp("ranks"), *options)
    return json.loads((folder / "found.json").read_text()), folder / "page.md"


def test_the_ranks_agree_with_one_process_and_with_float64(written: tuple[dict[str, Any], Path]) -> None:
    found = written[0]["sizes"]["2"]

    named = [row["name"] for row in found["correctness"]]
    assert named == [
        f"TP={size}, {method}{way}" for method in METHODS for size, way in ((1, ""), (2, ""), (2, SEQUENCE))
    ]
    for row in found["correctness"]:
        assert max(row["float64"].values()) < 1e-5
        assert row["same_loss_everywhere"]
        assert row["same_bits_again"]
    assert [row["name"] for row in found["options"]] == [f"TP=2, {way}" for way in WAYS]
    for row in [row for row in found["correctness"] if row["one_gpu"]] + found["options"]:
        assert max(row["one_gpu"].values()) < 1e-5


def test_every_way_is_timed_with_its_products_and_its_collectives(written: tuple[dict[str, Any], Path]) -> None:
    found = written[0]["sizes"]["2"]

    assert {f"TP=2, {way}" for way in WAYS} < {row["name"] for row in found["times"]}
    assert {"products, TP=1", "products, TP=2"} < {row["name"] for row in found["times"]}
    assert [row["name"].split(" ")[0] for row in found["collectives"]] == [
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "all_reduce",
    ]
    assert all(row["ms"] > 0 for row in found["times"] + found["collectives"])
    assert [row["same_bits"] for row in found["graphs"]] == [True] * len(WAYS)


def test_a_size_that_cannot_be_measured_is_said_with_its_reason(written: tuple[dict[str, Any], Path]) -> None:
    (skipped,) = written[0]["skipped"]

    assert (skipped["size"], skipped["reason"]) == (3, "96 classes and 40 tokens are not divided by 3")
    assert f"Not measured: {skipped['reason']}." in written[1].read_text()


def test_the_page_is_made_again_from_the_numbers_without_torch(
    written: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    again = page_without_torch(FOLDER, written[1].parent, tmp_path / "again.md")

    assert again == written[1].read_text()
    for way in WAYS:
        assert f"| TP=2, {way} |" in again


def test_a_launch_that_fails_is_a_problem_with_its_output(tmp_path: Path) -> None:
    kept = tmp_path / "found.json"
    options = ["--device", "cpu", "--quick", "--sizes", "2", "--limit", "0.5", "--json", str(kept)]
    command = [sys.executable, FOLDER / "run.py", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)

    assert done.returncode == 1
    (problem,) = json.loads(kept.read_text())["problems"]
    assert problem.startswith("TP=2: not done after 0.5 s")
    assert "## Problems" in done.stdout
