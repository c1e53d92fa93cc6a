"""Which source tree is it? Version strings do not tell, so a tree is named by its content, as git names it.

The id of a package folder is that of the git tree object: whoever has the repository can compare it with
`git rev-parse COMMIT:megatron`, also when the tree came without its history.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Collection
from pathlib import Path

from megacpp_overlays.repro.case import PackError

EMPTY = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
"""What git calls a folder with nothing in it."""


def describe(tree: Path, packages: Collection[str]) -> dict[str, str]:
    """Return the git id of each package folder, and the commit when the tree is a git checkout.

    Args:
        tree: the folder that holds the package folders.
        packages: top-level packages that could be in it, the most expected first.

    Raises:
        PackError: the tree holds none of them.
    """
    found = {name: tree_id(tree / name)[:12] for name in sorted(set(packages)) if (tree / name).is_dir()}
    if not found:
        raise PackError(f"--tree: it holds no package folder of this pack, such as {next(iter(packages))}")
    return found | ({"commit": commit} if (commit := _commit(tree)) else {})


def tree_id(folder: Path) -> str:
    """Return the id that git gives to a folder with this content; bytecode does not count."""
    entries = []
    for entry in os.scandir(folder):
        if entry.name == "__pycache__" or entry.name.endswith(".pyc"):
            continue
        if entry.is_symlink():
            entries.append((entry.name, "120000", _id("blob", os.readlink(entry.path).encode())))
        elif entry.is_dir():
            if (inner := tree_id(Path(entry.path))) != EMPTY:  # git knows no empty folder
                entries.append((f"{entry.name}/", "40000", inner))  # and sorts a folder by its name with a slash
        else:
            mode = "100755" if entry.stat().st_mode & 0o100 else "100644"
            entries.append((entry.name, mode, _id("blob", Path(entry.path).read_bytes())))
    body = b"".join(
        f"{mode} {name.rstrip('/')}\0".encode() + bytes.fromhex(found) for name, mode, found in sorted(entries)
    )
    return _id("tree", body)


def _id(kind: str, content: bytes) -> str:
    header = f"{kind} {len(content)}\0".encode()
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()


def _commit(tree: Path) -> str | None:
    """Return the commit of a checkout whose top is this folder, and whether it was modified."""
    top = _git(tree, "rev-parse", "--show-toplevel")
    commit = _git(tree, "rev-parse", "HEAD")
    if top is None or commit is None or Path(top).resolve() != tree.resolve():
        return None
    return commit[:12] + (" modified" if _git(tree, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(  # noqa: S603 - it only reads
            command, capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
