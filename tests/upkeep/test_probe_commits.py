"""`scripts/probe_commits.py` over a repository of our stand-ins: which commits it reads, and which findings are lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from repositories import commit_all, git
from trees import STAND_INS

PART = "hopper-flce-dispatch megatron.core.fusions.fused_linear_cross_entropy"
ENTRY = Path("megatron/core/fusions/linear_cross_entropy/blackwell/entry.py")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository whose main had another module ten days ago, with the head of one pull request."""
    folder = tmp_path_factory.mktemp("upstream")

    def commit(day: int) -> None:
        commit_all(folder, date=f"2026-08-{day}T12:00:00+00:00")

    shutil.copytree(STAND_INS["dev-linear-cross-entropy"], folder, dirs_exist_ok=True)
    text = (folder / ENTRY).read_text()
    (folder / ENTRY).write_text(text.replace("accu,", "lse,"))
    commit(day=10)
    (folder / ENTRY).write_text(text)
    commit(day=20)
    git(folder, "checkout", "--quiet", "--detach")
    shutil.copytree(STAND_INS["pr3345-linear-cross-entropy"], folder, dirs_exist_ok=True)
    commit(day=21)
    git(folder, "update-ref", "refs/pull/3345/head", "HEAD")
    return folder


def run(repository: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    script = ROOT / "scripts/probe_commits.py"
    command = [sys.executable, script, repository, "--branch", "main", "--weeks", "1", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def kept(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("kept") / "findings.json"
    done = run(repository, "--keep", file)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_heads_weekly_commits_and_pull_requests_are_read(kept: dict[str, Any]) -> None:
    found = {name: row[:2] for name, row in kept["findings"][PART].items()}

    assert found == {
        "main": ["BROKEN", "blackwell-only"],
        "main 2026-08-13": ["UNRECOGNISED", None],
        "pull 3345": ["BROKEN", "blackwell-and-hopper"],
    }


def test_a_finding_that_was_recognised_and_is_no_longer_is_lost(
    repository: Path, kept: dict[str, Any], tmp_path: Path
) -> None:
    kept["findings"][PART]["main 2026-08-13"] = ["BROKEN", "blackwell-only", "as it was"]
    (tmp_path / "before.json").write_text(json.dumps(kept))

    done = run(repository, "--against", tmp_path / "before.json")

    assert done.returncode == 1
    assert done.stdout.startswith(f"{PART}\n  BROKEN blackwell-only  ->  UNRECOGNISED ")
    assert "UNRECOGNISED unlike " in done.stdout
    assert done.stdout.endswith("\n      1: main 2026-08-13\n")


@pytest.mark.full
def test_a_commit_that_is_recognised_since_is_shown_and_not_lost(
    repository: Path, kept: dict[str, Any], tmp_path: Path
) -> None:
    kept["findings"][PART]["main"] = ["UNRECOGNISED", None, "not read yet"]
    kept["findings"][PART]["main 2026-08-13"] = ["UNRECOGNISED", None, "for another reason"]
    (tmp_path / "before.json").write_text(json.dumps(kept))

    done = run(repository, "--against", tmp_path / "before.json")

    assert (done.returncode, done.stdout) == (
        0,
        f"{PART}\n  UNRECOGNISED not read yet  ->  BROKEN blackwell-only\n      1: main\n",
    )
