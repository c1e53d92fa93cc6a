"""Git repositories for tests, made without the configuration of user and system."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path


def git(folder: Path, *words: str, date: str | None = None) -> str:
    """Run git with a placeholder identity; return its output.

    Args:
        folder: where.
        words: the arguments of git.
        date: of the commit; now where there is none.
    """
    own = ("-c", "user.name=A Person", "-c", "user.email=person@example.org", "-c", "init.defaultBranch=main")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env = {**kept, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    env |= {} if date is None else {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    done = subprocess.run(["git", *own, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit_all(folder: Path, *, date: str | None = None) -> str:
    """Commit everything in a folder, in a repository of its own; return the commit."""
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "all of it", date=date)
    return git(folder, "rev-parse", "HEAD")


def write_files(folder: Path, files: Mapping[str, str]) -> Path:
    """Write files below a folder, with the folders that they need; return the folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder
