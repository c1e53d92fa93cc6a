"""Tests of real source trees are skipped, and not passed, where no tree was given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from places import ROOT
from trees import STAND_INS

TEST = "tests/probes/test_recorded_places.py::test_given_trees_are_recognised[tp-label-smoothing cross_entropy]"


def run(*words: str | Path) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TEST, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_without_a_tree_there_is_nothing_to_say() -> None:
    assert "1 skipped" in (said := run()), said
    assert "no --upstream-tree was given" in said
    assert "passed" not in said


def test_a_tree_is_tested() -> None:
    assert "1 passed" in (said := run("--upstream-tree", STAND_INS["dev-linear-cross-entropy"])), said


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    assert "no such folder" in run("--upstream-tree", tmp_path / "none")
