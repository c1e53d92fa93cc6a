"""A commit of a repository as a tree of files, read from its objects: nothing is checked out and nothing is fetched."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megacpp_overlays.errors import SourceError, UpkeepError
from megacpp_overlays.upkeep.matrix.file_trees import FileTree

_LINK, _SUBMODULE = "120000", "160000"
_MOST_LINKS = 40
"""In one path; Linux has the same limit."""


class _Entry(NamedTuple):
    mode: str
    kind: str
    """`blob`, `tree`, or `commit` for a submodule."""
    object: str


class GitCommit(FileTree):
    """The files of a commit. A folder inside a repository is the top of what is read, as it is in a checkout."""

    def __init__(self, repository: Path, revision: str) -> None:
        """Open a commit.

        Raises:
            UpkeepError: this is no repository, it has no such commit, or not all that belongs to it.
        """
        self._repository = repository
        said = git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
        if said is None:
            known = git(repository, "rev-parse", "--git-dir") is not None
            why = f"this repository has no commit {revision!r}" if known else "git finds no repository there"
            raise UpkeepError(f"{repository}: {why}; try PATH@BRANCH, PATH@TAG or PATH@COMMIT")
        self.commit = said.strip()
        """All 40 digits."""
        self._top = (git(repository, "rev-parse", "--show-prefix") or "").rstrip("\n")
        listed = git(repository, "ls-tree", "-r", "-t", "-z", "--full-tree", self.commit)
        if listed is None:
            raise self._incomplete("the list of files")
        self._entries = dict(_entry(line) for line in listed.split("\0") if line)
        command = _command(repository, "cat-file", "--batch")
        self._process = subprocess.Popen(  # noqa: S603 - it only reads
            command, env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def read(self, path: str) -> bytes | None:
        """Return a file of the commit, or None when there is no such file.

        Raises:
            SourceError: a link in the path leads out of the repository, or nowhere.
            UpkeepError: the repository lacks the content, as a partial clone does, or has it in a submodule.
        """
        entry = self._find(path)
        return self._content(path, entry) if entry is not None and entry.kind == "blob" else None

    def has_folder(self, path: str) -> bool:
        """Return whether the commit has such a folder.

        Raises:
            SourceError: a link in the path leads out of the repository, or nowhere.
            UpkeepError: it is a submodule, or in one.
        """
        entry = self._find(path)
        return entry is not None and entry.kind == "tree"

    def close(self) -> None:
        """End the process that reads."""
        # Its end closes the pipes, which ends the process, and waits. Where it ended before, it left what it was asked.
        with contextlib.suppress(BrokenPipeError), self._process:
            pass

    def _find(self, path: str) -> _Entry | None:
        found = self._resolve(path, f"{self._top}{path}", iter(range(_MOST_LINKS)))
        return None if found is None else self._entries.get(found)

    def _resolve(self, asked: str, path: str, links: Iterator[int]) -> str | None:
        """Return a path of the repository without links in it; None when there is nothing."""
        at: list[str] = []
        for part in path.split("/"):
            if part in {"", "."}:
                continue
            if part == "..":
                if not at:
                    raise SourceError(f"{asked}: a link there leads out of the repository")
                at.pop()
                continue
            folder, name = list(at), "/".join([*at, part])
            at.append(part)
            if (entry := self._entries.get(name)) is None:
                return None
            if entry.mode == _SUBMODULE:
                if name == f"{self._top}src":  # only one of the two places where packages are looked for
                    return None
                raise UpkeepError(f"{self._repository}: {name} is a submodule; give PATH of it, once it is checked out")
            if entry.mode == _LINK:
                if next(links, None) is None:
                    raise SourceError(f"{asked}: a link there leads to itself")
                target = os.fsdecode(self._content(name, entry))
                if target.startswith("/"):
                    raise SourceError(f"{asked}: a link there leads out of the repository, to {target}")
                if (found := self._resolve(asked, "/".join([*folder, target]), links)) is None:
                    raise SourceError(f"{asked}: a link there leads to nothing, {target}")
                at = found.split("/")
        return "/".join(at)

    def _content(self, path: str, entry: _Entry) -> bytes:
        given, answers = self._process.stdin, self._process.stdout
        if given is None or answers is None:
            raise self._incomplete(path)
        try:
            given.write(f"{entry.object}\n".encode())
            given.flush()
        except BrokenPipeError:
            raise self._incomplete(path) from None
        header = answers.readline().split()
        if len(header) != 3 or header[1] != b"blob":  # "NAME missing", or nothing where the process gave up
            raise self._incomplete(path)
        content = answers.read(int(header[2]) + 1)  # a line feed follows it
        if len(content) != int(header[2]) + 1:
            raise self._incomplete(path)
        return content[:-1]

    def _incomplete(self, what: str) -> UpkeepError:
        return UpkeepError(
            f"{self._repository}: git cannot give {what} of {self.commit[:12]}; is it a partial clone, or damaged? "
            "Give a whole clone: nothing is fetched from here"
        )


def _entry(line: str) -> tuple[str, _Entry]:
    about, _, path = line.partition("\t")
    return path, _Entry(*about.split())


def git(repository: Path, *arguments: str) -> str | None:
    """Return what git says, or None when it fails."""
    try:
        done = subprocess.run(  # noqa: S603 - it only reads
            _command(repository, *arguments),
            env=_environment(),
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",  # a path may be any bytes
            check=False,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _command(repository: Path, *arguments: str) -> list[str]:
    bare = (repository / "HEAD").is_file() and (repository / "objects").is_dir()
    place = ("--git-dir", str(repository)) if bare else ("-C", str(repository))
    # A partial clone would ask its network for what it lacks. GIT_NO_LAZY_FETCH is only known since git 2.44.
    return ["git", "-c", "protocol.allow=never", *place, *arguments]


@functools.cache
def _environment() -> dict[str, str]:
    # GIT_DIR and its like, as in a hook, would answer for another repository.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return {**kept, "GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0"}
