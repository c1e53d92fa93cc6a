"""The comparison of installed files with the RECORD of their distribution: changed, missing, and added files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from megacpp_overlays.upkeep.drift import records
from megacpp_overlays.upkeep.drift.installations import Installation
from megacpp_overlays.upkeep.drift.records import CannotCheckError, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDifference:
    """One file that is not as published."""

    file: str
    """The path in the form of RECORD."""
    kind: Kind
    path: Path
    is_committed: bool = False
    """Whether the file is compared with a commit; git takes the path that is written in a link as its content."""

    @property
    def sha256(self) -> str | None:
        """Hash of the present file; None where it is missing or cannot be read."""
        try:
            if self.is_committed and self.path.is_symlink():
                return hashlib.sha256(os.fsencode(os.readlink(self.path))).hexdigest()
            return records.sha256(self.path)
        except OSError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The result of a comparison."""

    checked: int
    differences: tuple[FileDifference, ...]
    unchecked: tuple[str, ...] = ()
    """Files that cannot be checked, each with its reason."""


class Owners:
    """The files and folders that RECORDs name; many distributions may share a folder such as `nvidia`."""

    def __init__(self, every: Collection[Installation]) -> None:
        self._every = every
        self._known: dict[Path, tuple[frozenset[str], frozenset[str]]] = {}

    def of(self, root: Path) -> tuple[frozenset[str], frozenset[str]]:
        """Return the files and the folders that the RECORDs in one site-packages name."""
        if root not in self._known:
            files = frozenset(e.file for each in self._every if each.root == root for e in each.entries or ())
            self._known[root] = files, _folders(files)
        return self._known[root]


def compare(installation: Installation, owners: Owners, *, quick: bool = False) -> Files:
    """Compare the files of one distribution with its RECORD.

    Args:
        installation: a distribution with a RECORD.
        owners: the owners of all installed files.
        quick: whether to compare only sizes, see `records.difference`.
    """
    found: list[FileDifference] = []
    unchecked: list[str] = []
    checked = 0
    for entry in installation.entries or ():
        if not entry.algorithm and entry.may_lack_hash:
            continue
        path = _place(installation, entry.file)
        if not installation.is_within(path):
            unchecked.append(f"{entry.file} lies outside of this environment, and is not read")
            continue
        if records.is_bytecode(PurePosixPath(entry.file)) and not records.hides_source(path):
            continue
        try:
            kind = records.difference(entry, path, quick=quick)
        except CannotCheckError as error:
            unchecked.append(str(error))
            continue
        checked += 1
        if kind is not None:
            found.append(FileDifference(file=entry.file, kind=kind, path=path))
    found += [
        FileDifference(file=each, kind=Kind.ADDED, path=installation.path(each))
        for each in _added(installation, owners)
    ]
    found.sort(key=lambda each: each.file)
    return Files(checked=checked, differences=tuple(found), unchecked=tuple(unchecked))


def _place(installation: Installation, file: str) -> Path:
    path = installation.path(file)
    if not file.startswith("../") or (installation.is_within(path) and path.exists()):
        return path
    if (moved := installation.root / "bin" / PurePosixPath(file).name).exists():
        return moved  # `pip install --target` moves scripts there, and leaves RECORD as it was
    return path


def _added(installation: Installation, owners: Owners) -> Iterator[str]:
    """Yield the files, and links to folders, in the package folders of a distribution that no RECORD names.

    Bytecode that hides its source must be in a RECORD with a hash, because an installer also lists the files that it compiles.

    A file belongs to the distribution that has files in the nearest folder above it. So in a shared folder, a file in the
    part of another distribution belongs to that distribution.
    """
    named, everywhere = owners.of(installation.root)
    hashed = {entry.file for entry in installation.entries or () if entry.algorithm}
    own = _folders(entry.file for entry in installation.entries or ())
    for top in sorted(folder for folder in own if "/" not in folder):
        for file in _walk(installation.root, top):
            known = hashed if records.is_bytecode(PurePosixPath(file)) else named
            if file not in known and _nearest(file, everywhere) in own:
                yield file


def _folders(files: Iterable[str]) -> frozenset[str]:
    """Return all package folders that contain these files, directly or in subfolders."""
    return frozenset(
        str(above)
        for folder in {file.rpartition("/")[0] for file in files}  # most files share theirs
        for above in PurePosixPath(folder, "file").parents
        if above.parts and ".." not in above.parts and not above.is_absolute() and not _is_metadata(above.parts[0])
    )


def _is_metadata(top: str) -> bool:
    return top.endswith((".dist-info", ".egg-info"))


def _nearest(file: str, folders: Collection[str]) -> str:
    path = PurePosixPath(file)  # the path itself, too: it may be a link in place of a folder of a RECORD
    return next((str(each) for each in (path, *path.parents) if str(each) in folders), "")


def _walk(root: Path, top: str) -> Iterator[str]:
    for folder, inner, files in os.walk(root / top):
        inner.sort()
        links = [name for name in inner if Path(folder, name).is_symlink()]  # which os.walk does not follow
        within = Path(folder).relative_to(root).as_posix()
        for name in sorted([*files, *links]):
            file = PurePosixPath(within, name)
            if not records.is_bytecode(file) or _hides(Path(folder, name)):
                yield str(file)


def _hides(path: Path) -> bool:
    """Return whether a file hides its source, or is a `__pycache__` that is a link, so that files in it may."""
    return records.hides_source(path) or (path.name == "__pycache__" and path.is_symlink())
