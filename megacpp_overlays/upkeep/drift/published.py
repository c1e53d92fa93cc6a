"""Installed files against the RECORD of their distribution: changed, missing, and added."""

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
    """As RECORD names it, or as it would."""
    kind: Kind
    path: Path
    is_committed: bool = False
    """Whether git has it, for which a link is the path that is written in it, wherever that leads."""

    @property
    def sha256(self) -> str | None:
        """Hash of what is there now; None where nothing is, or nothing that can be read."""
        try:
            if self.is_committed and self.path.is_symlink():
                return hashlib.sha256(os.fsencode(os.readlink(self.path))).hexdigest()
            return records.sha256(self.path)
        except OSError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What comparing came to."""

    checked: int
    differences: tuple[FileDifference, ...]
    unchecked: tuple[str, ...] = ()
    """Files that nothing can be said about, each with its reason."""


class Owners:
    """Which files and folders RECORDs name; a folder such as `nvidia` may be shared by many distributions."""

    def __init__(self, every: Collection[Installation]) -> None:
        self._every = every
        self._known: dict[Path, tuple[frozenset[str], frozenset[str]]] = {}

    def of(self, root: Path) -> tuple[frozenset[str], frozenset[str]]:
        """Return the files and the folders that the RECORDs of one site-packages name."""
        if root not in self._known:
            files = frozenset(e.file for each in self._every if each.root == root for e in each.entries or ())
            self._known[root] = files, _folders(files)
        return self._known[root]


def compare(installation: Installation, owners: Owners, *, quick: bool = False) -> Files:
    """Compare the files of one distribution with its RECORD.

    Args:
        installation: one with a RECORD.
        owners: of all that is installed.
        quick: compare sizes, see `records.difference`.
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

    What hides its source has to be named with a hash: an installer names what it compiles, too.

    A file belongs to whoever has files in the nearest folder above it, so that what lies in the part of another
    distribution in a shared folder is left to that one.
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
    """Return all package folders that hold these files, or hold a folder that does."""
    return frozenset(
        str(above)
        for folder in {file.rpartition("/")[0] for file in files}  # most files share theirs
        for above in PurePosixPath(folder, "file").parents
        if above.parts and ".." not in above.parts and not above.is_absolute() and not _is_metadata(above.parts[0])
    )


def _is_metadata(top: str) -> bool:
    return top.endswith((".dist-info", ".egg-info"))


def _nearest(file: str, folders: Collection[str]) -> str:
    path = PurePosixPath(file)  # itself: a link may stand where a RECORD has a folder
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
    """Return whether a file in `__pycache__` hides its source, or that folder is a link, so that it may."""
    return records.hides_source(path) or (path.name == "__pycache__" and path.is_symlink())
