"""Trees in addition to the releases: a folder as it is, or a commit of a repository."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from megacpp_overlays.errors import SourceError, UpkeepError
from megacpp_overlays.model import Erratum
from megacpp_overlays.repro import git
from megacpp_overlays.repro import trees as named
from megacpp_overlays.repro.case import PackError
from megacpp_overlays.source.file_trees import DirectoryTree, FileTree
from megacpp_overlays.upkeep.matrix.combinations import Partner
from megacpp_overlays.upkeep.matrix.commit_tree import CommitTree
from megacpp_overlays.upkeep.matrix.matrix import COMMITTED, Row, packages, probe


class Tree(NamedTuple):
    """An opened tree."""

    files: FileTree
    name: str
    source: str
    date: str | None


def open_tree(text: str, known: Collection[str], stack: ExitStack) -> Tree:
    """Open the tree that the user named as PATH or PATH@REV.

    Args:
        text: a folder with package folders, or a git repository and a revision of it; a bare repository without a
            revision is read at HEAD.
        known: top-level packages of the targets.
        stack: closes the tree when the stack exits.

    Raises:
        UpkeepError: there is no such tree, or it holds none of the packages.
    """
    path, revision = Path(text), ""
    if not path.exists() and "@" in text:
        before, _, revision = text.rpartition("@")
        path = Path(before)
    if not path.is_dir():
        raise UpkeepError(f"--tree {text}: there is no such folder")
    try:
        return _opened(text, path, revision, known, stack)
    except SourceError as error:  # a package that is a link
        raise UpkeepError(f"--tree {text}: {error}; give the folder that it leads to") from error


def _opened(text: str, path: Path, revision: str, known: Collection[str], stack: ExitStack) -> Tree:
    if not revision and not any(DirectoryTree(path).has_package(name) for name in known):
        if git.ask(path, "rev-parse", "--verify", "--quiet", "HEAD^{commit}") is None:
            raise UpkeepError(f"--tree {text}: it has no folder {' or '.join(sorted(known))}, and is no repository")
        revision = "HEAD"
    tree = _commit(path, revision) if revision else _folder(path, known)
    stack.enter_context(tree.files)
    if not any(tree.files.has_package(name) for name in known):
        raise UpkeepError(f"--tree {text}: it has no folder {' or '.join(sorted(known))}")
    return tree


def tree_row(tree: Tree, overlays: Sequence[Erratum], beside: Mapping[str, Partner]) -> Row | None:
    """Return the row of a tree for the overlays of one distribution; None when the tree has nothing of it.

    Args:
        tree: the tree to read.
        overlays: the overlays of one table.
        beside: see `matrix.table`.
    """
    if not any(tree.files.has_package(name) for name in packages(overlays)):
        return None
    return Row(
        name=tree.name,
        date=tree.date,
        dated=COMMITTED if tree.date else None,
        source=tree.source,
        sha256=None,
        yanked=None,
        cells=probe(overlays, tree.files, beside),
    )


def _commit(path: Path, revision: str) -> Tree:
    files = CommitTree(path, revision)
    short = files.commit[:12]
    name = git.ask(path, "rev-parse", "--abbrev-ref", revision) or revision
    return Tree(files, short if files.commit.startswith(name) else name, short, _date(path, files.commit))


def _folder(path: Path, known: Collection[str]) -> Tree:
    files = DirectoryTree(path, prefix="")
    has = [name for name in known if files.has_folder(name)]
    try:
        ids = named.describe(path, has) if has else {}
    except PackError as error:
        raise UpkeepError(f"--tree {path}: {error}") from error
    commit = ids.get("commit", "")
    source = commit or ", ".join(f"{name} {value}" for name, value in ids.items()) or "a folder"
    return Tree(files, path.resolve().name, source, _date(path, "HEAD") if commit else None)


def _date(repository: Path, revision: str) -> str | None:
    said = git.ask(repository, "log", "-1", "--format=%ct", revision) or ""
    return datetime.fromtimestamp(int(said), timezone.utc).date().isoformat() if said.isdigit() else None
