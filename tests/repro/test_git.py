"""Git is asked about a repository, and neither the repository nor the shell says what else is run for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megacpp_overlays.repro import git


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    subprocess.run(["git", "init", "-q", "-b", "main", str(folder)], check=True)
    (folder / "layers.py").write_text("x = 1\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for arguments in (["add", "."], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(folder), *arguments], check=True)
    return folder


def test_an_answer_is_what_git_prints(repository: Path) -> None:
    assert git.run(repository, "ls-files", "-z") == "layers.py\0"
    assert git.ask(repository, "rev-parse", "--abbrev-ref", "HEAD") == "main"


def test_a_failure_is_an_error_with_the_first_line_of_git(repository: Path) -> None:
    with pytest.raises(git.GitError, match=r"^git rev-parse: fatal: .*nonsense"):
        git.run(repository, "rev-parse", "nonsense", "--")
    assert git.ask(repository, "rev-parse", "--verify", "nonsense") is None


def test_without_git_that_is_what_is_said(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")

    with pytest.raises(git.GitError, match="git is not installed here"):
        git.run(repository, "status")


def test_variables_of_a_hook_do_not_choose_the_repository(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))

    assert git.run(repository, "ls-files") == "layers.py\n"


@pytest.mark.parametrize("setting", ["core.fsmonitor", "core.hooksPath"])
def test_programs_that_a_repository_names_are_not_run(repository: Path, tmp_path: Path, setting: str) -> None:
    ran = tmp_path / "ran"
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("post-index-change", "watch"):
        (folder / name).write_text(f"#!/bin/sh\ntouch {ran}\n")
        (folder / name).chmod(0o755)
    value = folder / "watch" if setting == "core.fsmonitor" else folder
    subprocess.run(["git", "-C", str(repository), "config", setting, str(value)], check=True)
    subprocess.run(["git", "-C", str(repository), "update-index", "--force-write-index"], check=True)
    assert ran.exists()  # git itself runs it
    ran.unlink()

    git.run(repository, "status", "--porcelain")
    git.run(repository, "update-index", "--force-write-index")

    assert not ran.exists()


def test_no_protocol_may_be_used_even_where_the_user_allows_it(repository: Path, tmp_path: Path) -> None:
    subprocess.run(["git", "-C", str(repository), "config", "protocol.file.allow", "always"], check=True)

    with pytest.raises(git.GitError, match="transport 'file' not allowed"):
        git.run(repository, "fetch", f"file://{repository}")
