"""A commit of a repository as a tree of files, read from its objects, without checking out or fetching anything.

`git archive` would be one stream, but attributes of the commit may leave files out of it or rewrite them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from megacpp_overlays import files
from megacpp_overlays.errors import SourceError, UpkeepError
from megacpp_overlays.repro import git
from megacpp_overlays.source.file_trees import FileTree

_LINK = "120000"
_MOST_LINKS = 40
"""Maximum number of links in one path; Linux has the same limit."""


class _Entry(NamedTuple):
    mode: str
    kind: str
    """`blob`, `tree`, or `commit` for a submodule."""
    object: str


class CommitTree(FileTree):
    """The files of a commit. The paths are relative to the given folder inside the repository, as they are in a checkout."""

    def __init__(self, repository: Path, revision: str) -> None:
        """Open a commit.

        Raises:
            UpkeepError: this is no repository, it has no such commit, or it lacks objects of the commit.
        """
        self._repository = repository
        commit = git.ask(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
        if commit is None:
            known = git.ask(repository, "rev-parse", "--git-dir") is not None
            why = f"this repository has no commit {revision!r}" if known else "git finds no repository there"
            raise UpkeepError(f"{repository}: {why}; try PATH@BRANCH, PATH@TAG or PATH@COMMIT")
        self.commit = commit
        """All 40 digits."""
        self._top = git.ask(repository, "rev-parse", "--show-prefix") or ""
        listed = os.fsdecode(self._git("the list of files", "ls-tree", "-r", "-t", "-z", "--full-tree", commit))
        pairs = (line.partition("\t") for line in listed.split("\0") if line)
        self._entries = {path: _Entry(*about.split()) for about, _, path in pairs}

    def read(self, path: str) -> bytes | None:
        """Return a file of the commit, or None when there is no such file.

        Raises:
            SourceError: a link in the path leads out of the repository, or nowhere.
            UpkeepError: the repository lacks the content, as a partial clone does, or the file is in a submodule.
        """
        entry = self._find(path)
        return self._content(path, entry) if entry is not None and entry.kind == "blob" else None

    def has_folder(self, path: str) -> bool:
        """Return whether the commit has such a folder.

        Raises:
            SourceError: a link in the path leads out of the repository, or nowhere.
            UpkeepError: the folder is a submodule, or in one.
        """
        entry = self._find(path)
        return entry is not None and entry.kind == "tree"

    def _find(self, asked: str) -> _Entry | None:
        """Follow a path, and the links in it, as a checkout would."""
        at: list[str] = []
        ahead = f"{self._top}{asked}".split("/")
        entry, links, beyond = None, 0, len(ahead)
        while ahead:
            part = ahead.pop(0)
            if part in {"", "."}:
                continue
            if part == "..":
                if not at:
                    raise SourceError(f"{asked}: a link there leads out of the repository")
                at.pop()
                continue
            name = "/".join([*at, part])
            if (entry := self._entries.get(name)) is None:
                if len(ahead) >= beyond:  # the missing path comes from a link, not from the requested path
                    raise SourceError(f"{asked}: a link there leads to nothing, {name}")
                return None
            if entry.kind == "commit":
                if name == f"{self._top}src":  # only one of the two folders that are searched for packages
                    return None
                raise UpkeepError(f"{self._repository}: {name} is a submodule; give PATH of it, once it is checked out")
            if entry.mode != _LINK:
                at.append(part)
                continue
            target, links, beyond = os.fsdecode(self._content(name, entry)), links + 1, min(beyond, len(ahead))
            if links > _MOST_LINKS:
                raise SourceError(f"{asked}: a link there leads to itself")
            if target.startswith("/"):
                raise SourceError(f"{asked}: a link there leads out of the repository, to {target}")
            ahead = [*target.split("/"), *ahead]
        return self._entries.get("/".join(at))

    def _content(self, path: str, entry: _Entry) -> bytes:
        size = int(self._git(path, "cat-file", "-s", entry.object))
        if size > files.LARGEST:
            raise SourceError(f"{path}: it is larger than {files.LARGEST} bytes")
        return self._git(path, "cat-file", "blob", entry.object)

    def _git(self, subject: str, *arguments: str) -> bytes:
        try:
            return git.content(self._repository, *arguments)
        except git.GitError as error:
            raise UpkeepError(
                f"{self._repository}: git cannot give {subject} of {self.commit[:12]}; is it a partial clone, or damaged? "
                "Give a whole clone: nothing is fetched from here"
            ) from error
