"""The comparison of the package folders of a source checkout with the commit that is checked out.

git itself compares, through a temporary index that is read from the commit. So staged changes, flags of the repository's own
index such as `assume-unchanged`, and its cached file states have no effect. Filters and ignore rules outside the commit hide
no change either: content is compared without running filters, and ignored Python files are listed. A submodule that is
checked out is compared in the same way.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from megacpp_overlays.repro import git
from megacpp_overlays.repro.git import GitError
from megacpp_overlays.upkeep.drift import records
from megacpp_overlays.upkeep.drift.published import FileDifference, Files
from megacpp_overlays.upkeep.drift.records import Kind

_PLAIN = (
    "core.fileMode=false",  # execute permission is no part of the content
    "core.untrackedCache=false",
    f"core.excludesFile={os.devnull}",
    f"core.attributesFile={os.devnull}",
)
_KINDS = {"M": Kind.CHANGED, "T": Kind.CHANGED, "D": Kind.MISSING, "?": Kind.ADDED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """The comparison of some packages in one work tree with its commit."""

    commit: str
    """Full id of the commit."""
    top: Path
    files: Files


def compare(paths: Sequence[Path], base: Path) -> Checkout:
    """Compare folders and files of one work tree with its commit.

    Ignored files are skipped, except for files in the package folders that Python would import. If the whole work tree is
    compared, all ignored files are skipped, because environments and builds are among them.

    Args:
        paths: package folders, or modules, of one work tree.
        base: the folder that file names are relative to, which holds the outermost packages.

    Raises:
        GitError: the paths are in no work tree, its commit does not have them, or git fails; the message is git's.
    """
    top = Path(_git(base, "rev-parse", "--show-toplevel").removesuffix("\n"))
    commit = _git(top, "rev-parse", "--verify", "HEAD^{commit}").strip()
    within = [os.path.relpath(path.resolve(), top) for path in paths]
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder, "index"))}
        _git(top, "read-tree", commit, **index)
        committed = _git(top, "ls-files", "--stage", "-z", "--", *within, **index).split("\0")[:-1]
        if not committed:  # such as site-packages of an environment inside a checkout
            raise GitError(f"{top} is a work tree, but its commit has nothing of {', '.join(within)}")
        status = _git(
            top, "status", "-z", "--no-renames", "--untracked-files=all", "--porcelain=v1", "--", *within, **index
        )
        packages = [each for each in within if each != "."]
        others = _git(top, "ls-files", "--others", "-z", "--", *packages, **index) if packages else ""
    kinds = {file: Kind.ADDED for file in others.split("\0")[:-1] if _is_imported(top / file)}
    changed, large = _compared(committed, top)
    kinds |= dict.fromkeys(changed, Kind.CHANGED)
    seen = {line[3:]: _KINDS[line[1]] for line in status.split("\0")[:-1] if line[3:] not in large}
    kinds |= {file: kind for file, kind in seen.items() if not records.is_bytecode(PurePosixPath(file))}
    kinds |= dict.fromkeys(_changed_submodules(committed, top), Kind.CHANGED)
    differences = sorted(_differences(kinds, top, base.resolve()), key=lambda each: each.file)
    return Checkout(commit=commit, top=top, files=Files(checked=len(committed), differences=tuple(differences)))


def _is_imported(path: Path) -> bool:
    """Return whether Python would run a file that the commit does not have."""
    if records.is_bytecode(PurePosixPath(path)):
        return records.hides_source(path)
    return path.suffix in {".py", ".pyc"} or path.is_dir()  # git names a link to a folder, and a repository, as one


def _compared(committed: Sequence[str], top: Path) -> tuple[list[str], set[str]]:
    """Return the files whose unfiltered content differs from the commit, and the files that Git LFS keeps by their hash.

    Line ends do not count, because `core.autocrlf` changes them on Windows.
    """
    changed, large = [], set()
    for line in committed:
        about, _, file = line.partition("\t")
        mode, blob, _ = about.split(" ")
        path = top / file
        if not mode.startswith("100") or path.is_symlink() or not path.is_file() or _is_beyond_a_link(path, top):
            continue  # git itself compares links and reports missing files
        content = path.read_bytes()
        plain = content.replace(b"\r\n", b"\n")
        if blob in {_blob(content, blob), _blob(plain, blob)}:
            continue
        if _is_large(content, top, blob):
            large.add(file)
        else:
            changed.append(file)
    return changed, large


def _is_beyond_a_link(path: Path, top: Path) -> bool:
    """Return whether a folder above a file is a symbolic link, so that the file is outside of this work tree."""
    return any(above.is_symlink() for above in path.parents if above.is_relative_to(top) and above != top)


def _changed_submodules(committed: Sequence[str], top: Path) -> Iterator[str]:
    """Yield the submodules that are checked out and differ from their own commit."""
    for line in committed:
        about, _, file = line.partition("\t")
        if (
            about.startswith("160000")
            and not _is_beyond_a_link(top / file / ".git", top)
            and (top / file / ".git").exists()
            and compare([top / file], top / file).files.differences
        ):
            yield file


def _blob(content: bytes, like: str) -> str:
    """Return the id that git gives to content; `like` is an id of the repository, whose length selects SHA-1 or SHA-256."""
    algorithm = "sha1" if len(like) == 40 else "sha256"
    return hashlib.new(algorithm, b"blob %d\0%b" % (len(content), content), usedforsecurity=False).hexdigest()


def _is_large(content: bytes, top: Path, blob: str) -> bool:
    """Return whether the commit has a Git LFS pointer with the hash of a content."""
    pointer = _git(top, "cat-file", "blob", blob)
    hashed = f"oid sha256:{hashlib.sha256(content).hexdigest()}"
    return pointer.startswith("version https://git-lfs.github.com/spec/") and hashed in pointer.splitlines()


def _differences(kinds: Mapping[str, Kind], top: Path, base: Path) -> Iterator[FileDifference]:
    for file, kind in kinds.items():
        path = top / file
        named = Path(os.path.relpath(path, base)).as_posix()
        yield FileDifference(file=named, kind=kind, path=path, is_committed=True)


def _git(folder: Path, *words: str, **variables: str) -> str:
    return git.run(folder, *words, settings=_PLAIN, variables=variables)
