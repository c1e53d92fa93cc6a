"""The benchmark of packed documents, on a CPU: a real hybrid model of Megatron, tiny sizes, few steps."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from places import HANG_S, ROOT

pytestmark = [pytest.mark.upstream, pytest.mark.full]

SCRIPT = ROOT / "benchmarks/packed_documents/run.py"
PYTHON = ROOT / ".envs/edge/bin/python"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert PYTHON.exists(), f"there is no {PYTHON}: run `make setup`"
    folder = tmp_path_factory.mktemp("packed")
    run("--device", "cpu", "--steps", "4", "--first", "3", "--every", "2", "--seeds", "1", folder=folder)
    return folder


def run(*options: str, folder: Path) -> None:
    files = ["--json", folder / "found.json", "--write", folder / "page.md", "--plot", folder / "plot.svg"]
    env = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    command = [PYTHON, "-W", "ignore", SCRIPT, *options, *files]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr


def starts(folder: Path) -> list[dict[str, Any]]:
    (seed,) = json.loads((folder / "found.json").read_text())["runs"]
    return [seed["from nothing"], seed["tuned"]]


def test_the_overlay_and_a_caller_who_gives_the_tokens_come_to_the_same_bits(folder: Path) -> None:
    for each in starts(folder):
        assert each["with"]["bits"] == each["told"]["bits"]
        for one, other in zip(each["with"]["looks"], each["told"]["looks"], strict=True):
            assert one == other


def test_without_the_overlay_the_first_loss_is_another_one(folder: Path) -> None:
    for each in starts(folder):
        assert each["without"]["first loss"] != each["with"]["first loss"]
        assert each["without"]["bits"] != each["with"]["bits"]


def test_with_the_overlay_packed_documents_are_answered_as_each_alone(folder: Path) -> None:
    for each in starts(folder):
        for look in each["with"]["looks"]:
            assert look["packed loss"] == pytest.approx(look["alone loss"], rel=1e-4)


def test_page_and_plot_are_made_again_from_the_numbers(folder: Path, tmp_path: Path) -> None:
    run("--page", str(folder / "found.json"), folder=tmp_path)

    for name in ("page.md", "plot.svg"):
        assert (tmp_path / name).read_text() == (folder / name).read_text()
    assert (folder / "plot.svg").read_text().count("<polyline") == 3
