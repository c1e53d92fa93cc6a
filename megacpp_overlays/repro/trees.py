"""Identity of a source tree: the git ids of its package folders, because version strings do not identify a tree.

The id of a package folder is that of the git tree object: a reader with the repository can compare it with
`git rev-parse COMMIT:megatron`, also when the tree came without its history.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from pathlib import Path

from megacpp_overlays import files
from megacpp_overlays.repro import git
from megacpp_overlays.repro.case import PackError

EMPTY = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
"""Id that git gives to an empty folder."""


MARKER = "STAND_IN"
"""File next to the package folders of a stand-in, a tree made by this project; its first word is the name."""
STAND_IN = "stand-in"
_CHUNK = 1 << 20


def describe(tree: Path, packages: Collection[str], others: Collection[str] = ()) -> dict[str, str]:
    """Return the git id of each package folder, and the commit when the tree is a git checkout.

    A stand-in has its name under the key `stand-in`: its results say nothing about upstream.

    Args:
        tree: the folder that holds the package folders.
        packages: top-level packages of the targets, the most expected first.
        others: top-level packages that may be in the tree, too.

    Raises:
        PackError: the tree holds none of the targets' packages, or nothing in them.
    """
    names = sorted({*packages, *others})
    ids = {name: tree_id(tree / name) for name in names if (tree / name).is_dir()}
    found = {name: id[:12] for name, id in ids.items() if id != EMPTY}
    if not any(name in found for name in packages):
        raise PackError(f"--tree: it holds no package folder of this pack, such as {next(iter(packages))}")
    if name := next(filter(None, (stand_in_of(tree / package / "__init__.py") for package in found)), None):
        return {STAND_IN: name, **found}
    return found | ({"commit": commit} if (commit := _commit(tree)) else {})


def stand_in_of(file: Path) -> str | None:
    """Return the name of the stand-in that a file is in, also through a link, or None."""
    for folder in dict.fromkeys((*file.parents, *file.resolve().parents)):
        if (marker := folder / MARKER).is_file():
            return next(iter(files.read(marker).decode(errors="replace").split()), "without a name")
    return None


def tree_id(folder: Path) -> str:
    """Return the id that git gives to a folder with this content, without bytecode files."""
    entries = []
    for entry in os.scandir(folder):
        if entry.name == "__pycache__" or entry.name.endswith(".pyc"):
            continue
        if entry.is_symlink():
            entries.append((entry.name, "120000", _id("blob", os.readlink(entry.path).encode())))
        elif entry.is_dir():
            if (inner := tree_id(Path(entry.path))) != EMPTY:  # git knows no empty folder
                entries.append((f"{entry.name}/", "40000", inner))  # and sorts a folder by its name with a slash
        elif entry.is_file():  # git knows neither a FIFO nor a device
            mode = "100755" if entry.stat().st_mode & 0o100 else "100644"
            entries.append((entry.name, mode, _id_of_file(Path(entry.path))))
    body = b"".join(
        f"{mode} {name.rstrip('/')}\0".encode() + bytes.fromhex(found) for name, mode, found in sorted(entries)
    )
    return _id("tree", body)


def _id(kind: str, content: bytes) -> str:
    header = f"{kind} {len(content)}\0".encode()
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()


def _id_of_file(path: Path) -> str:
    """Return the id of a file of any size."""
    with files.open_regular(path) as file:
        found = hashlib.sha1(f"blob {os.fstat(file.fileno()).st_size}\0".encode(), usedforsecurity=False)
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def _commit(tree: Path) -> str | None:
    """Return the commit of a checkout whose top is this folder, and whether it was modified."""
    top = git.ask(tree, "rev-parse", "--show-toplevel")
    commit = git.ask(tree, "rev-parse", "HEAD")
    if top is None or commit is None or Path(top).resolve() != tree.resolve():
        return None
    return commit[:12] + (" modified" if git.ask(tree, "status", "--porcelain", "--untracked-files=no") else "")
