"""The benchmark of training with sparse attention, on a CPU: a real layer of Megatron, tiny sizes, few steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import run_quickly
from places import HANG_S, ROOT

pytestmark = [pytest.mark.upstream, pytest.mark.full]

FOLDER = ROOT / "benchmarks/dsa_training"
WAYS = ["stock, float32", "stock", "stock, again", "stock, channels in another order", "overlays"]
"""Those that need no GPU."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the benchmark; return the folder of its output."""
    folder = tmp_path_factory.mktemp("dsa")
    return run_quickly(FOLDER, folder, "--plot", str(folder / "plot.svg"))


@pytest.fixture
def found(written: Path) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((written / "found.json").read_text())
    return kept


def test_every_way_learns(found: dict[str, Any]) -> None:
    assert list(found["ways"]) == WAYS
    for name, way in found["ways"].items():
        losses, size = way["losses"], found["size"]
        assert len(losses) == len(way["grad_norms"]) == len(way["indexer_losses"]) == size["steps"], name
        assert losses[-1] < losses[0], name
        assert min(way["indexer_losses"]) > 0, name


def test_stock_and_overlays_stay_together(found: dict[str, Any]) -> None:
    stock, ours = found["ways"]["stock"], found["ways"]["overlays"]

    for series in ("losses", "grad_norms", "indexer_losses"):
        assert ours[series] == pytest.approx(stock[series], rel=2e-2), series
        assert found["ways"]["stock, float32"][series] == pytest.approx(stock[series], rel=5e-2), series


def test_stock_once_more_is_the_same_and_in_another_order_nearly(found: dict[str, Any]) -> None:
    ways = found["ways"]

    assert ways["stock, again"]["losses"] == ways["stock"]["losses"]
    assert ways["stock, channels in another order"]["losses"] == pytest.approx(ways["stock"]["losses"], rel=1e-2)


def test_overlays_took_part_where_they_were_to(found: dict[str, Any]) -> None:
    assert found["calls"]["dsa-sparse-attention"] == found["size"]["steps"]
    assert found["calls"]["dsa-indexer-streaming"] > 0


def test_page_and_plot_are_made_again_from_the_numbers_without_torch(written: Path, tmp_path: Path) -> None:
    files = ["--write", tmp_path / "page.md", "--plot", tmp_path / "plot.svg"]
    command = [sys.executable, "-S", FOLDER / "page.py", written / "found.json", *files]
    subprocess.run(command, check=True, capture_output=True, timeout=HANG_S)

    for name in ("page.md", "plot.svg"):
        assert (tmp_path / name).read_text() == (written / name).read_text()
    page = (written / "page.md").read_text()
    assert page.count("| overlays |") == 3
    assert "The losses under overlays are at most " in page
    assert (written / "plot.svg").read_text().count("<polyline") == 2 * len(WAYS) - 1 + len(WAYS)


def test_channels_that_cannot_be_distinguished_are_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", FOLDER / "run.py", "--device", "cpu", "--quick", "--query", "32"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )

    assert done.returncode == 2
    assert "--hidden must be another number than --query" in done.stderr
