"""Installed distributions: version, RECORD and origin of each, from its metadata."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import importlib_metadata
from packaging.utils import canonicalize_name

from megacpp_overlays import json_text
from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.upkeep.drift import records
from megacpp_overlays.upkeep.drift.records import RecordEntry

_METADATA = ("METADATA", "PKG-INFO", "RECORD", "INSTALLER", "direct_url.json", "top_level.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The origin of a distribution, from `direct_url.json`. An installer writes it only for distributions that are not from an index.

    Format: https://packaging.python.org/specifications/direct-url/. The hash of an archive is not read, because the installer
    checks it: `pip install --require-hashes`, `uv pip sync --require-hashes`.
    """

    url: str
    editable: bool = False
    is_folder: bool = False
    """Whether it was installed from a folder, and not from an archive or a repository."""
    commit: str | None = None
    """Commit of the repository that the installer built from; None for a folder or an archive."""

    @property
    def folder(self) -> Path | None:
        """The local folder that it was installed from; None for an archive or a repository."""
        parts = urlsplit(self.url)
        return Path(unquote(parts.path)) if parts.scheme == "file" and self.is_folder else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """One installed distribution."""

    name: str
    """Canonical name, `liger-kernel`."""
    version: str
    root: Path
    """The folder that holds its packages and its metadata, usually site-packages."""
    entries: tuple[RecordEntry, ...] | None
    """The lines of RECORD; None where there is no usable RECORD."""
    why_not: str | None
    """The reason why there is no usable RECORD; None where there is one."""
    origin: Origin | None
    """None where there is no `direct_url.json`."""
    installer: str
    """The text of INSTALLER, such as `pip` or `uv`; empty where there is none."""
    top_levels: tuple[str, ...]
    """The names in `top_level.txt`, which setuptools writes; an editable install lists its packages nowhere else."""
    also: tuple[str, ...] = ()
    """Other versions whose metadata is in the same folder."""

    def path(self, file: str) -> Path:
        """Return the path of a file of RECORD."""
        return self.root / file

    def is_within(self, path: Path) -> bool:
        """Return whether a path is in `root` or, for a root such as PREFIX/lib/python3.12/site-packages, in PREFIX.

        Links are not resolved, because an installer may link each file to its cache.
        """
        above = self.root.parents  # PREFIX/lib/python3.12/site-packages
        is_prefix = len(above) > 3 and above[1].name.startswith("lib")  # PREFIX is not the root of the file system
        folders = (self.root, above[2]) if is_prefix else (self.root,)
        named = os.path.join(os.path.normpath(path), "")  # compared as text: a RECORD has ten thousand paths
        return any(named.startswith(os.path.join(each, "")) for each in folders)


def find_all(path: Sequence[str] | None = None) -> Mapping[str, Installation]:
    """Return every installed distribution by canonical name; of several with one name, the first on the path.

    Where its folder has metadata of other versions, too, its RECORD is not used, `why_not` has the reason and `also` the versions.

    Args:
        path: folders to search; None searches `sys.path`.

    Raises:
        UpkeepError: the metadata of a distribution cannot be read.
    """
    found: dict[str, Installation] = {}
    also: dict[str, list[str]] = {}
    for distribution in importlib_metadata.distributions(path=sys.path if path is None else list(path)):
        here = _installation(cast("importlib_metadata.Distribution", distribution))
        first = found.setdefault(here.name, here)
        if first is not here and first.root == here.root and here.version != first.version:
            also.setdefault(here.name, []).append(here.version)
    return {name: _twice(each, also[name]) if name in also else each for name, each in found.items()}


def _twice(first: Installation, versions: list[str]) -> Installation:
    """Return an installation without its RECORD, because the folder has metadata of other versions, too."""
    why = f"the folder has metadata of {', '.join((first.version, *versions))}: an upgrade was left half done"
    return dataclasses.replace(first, why_not=why, entries=None, also=tuple(versions))


def _installation(distribution: importlib_metadata.Distribution) -> Installation:
    root = Path(str(distribution.locate_file(""))).resolve()
    try:
        _demand_files(distribution)
        name, version = str(distribution.metadata["Name"]), str(distribution.version)
        origin = _origin(distribution.read_text("direct_url.json"))
        installer = (distribution.read_text("INSTALLER") or "").strip()
        top_levels = tuple((distribution.read_text("top_level.txt") or "").split())
    except Exception as error:
        where = getattr(distribution, "_path", root)  # the metadata folder has no public name
        raise UpkeepError(
            f"{where}: the metadata of this distribution cannot be read ({type(error).__name__}: {error}); "
            "reinstall it, or delete the folder if an installer left it behind"
        ) from error
    entries, why_not = _entries(distribution, installer)
    return Installation(
        name=canonicalize_name(name),
        version=version,
        root=root,
        entries=entries,
        why_not=why_not,
        origin=origin,
        installer=installer,
        top_levels=top_levels,
    )


def _demand_files(distribution: importlib_metadata.Distribution) -> None:
    """Check that the metadata files are regular files, because reading a FIFO would block.

    Raises:
        UpkeepError: one is not.
    """
    folder: object = getattr(distribution, "_path", None)  # the metadata folder has no public name
    for path in (folder / name for name in _METADATA) if isinstance(folder, Path) else ():
        if path.exists() and not path.is_file():
            raise UpkeepError(f"{path.name} is no regular file")


def _entries(
    distribution: importlib_metadata.Distribution, installer: str
) -> tuple[tuple[RecordEntry, ...] | None, str | None]:
    """Return the lines of RECORD, or the reason why there is no usable RECORD; the other one is None."""
    try:
        text = distribution.read_text("RECORD")
        if not text:
            return None, f"it was installed without a RECORD{f' by {installer}' if installer else ''}"
        return records.parse(text), None
    except UnicodeDecodeError as error:
        return None, f"RECORD is not UTF-8: {error}"
    except UpkeepError as error:
        return None, str(error)


def _origin(text: str | None) -> Origin | None:
    if not text:
        return None
    data: Any = json_text.parse(text)
    vcs, folder = (data.get(key) for key in ("vcs_info", "dir_info"))
    return Origin(
        url=str(data["url"]),
        editable=bool((folder or {}).get("editable")),
        is_folder=folder is not None,
        commit=(vcs or {}).get("commit_id"),
    )


def import_names(installation: Installation) -> tuple[str, ...]:
    """Return the outermost packages and modules that a distribution installs, such as `megatron.core`.

    They are those of the .py files in RECORD. An editable install, or one without a usable RECORD, has its `top_levels`.
    """
    if installation.entries is None or (installation.origin and installation.origin.editable):
        return installation.top_levels
    return tuple(sorted(_outermost(PurePosixPath(entry.file) for entry in installation.entries)))


def _outermost(files: Iterable[PurePosixPath]) -> set[str]:
    python = [path for path in files if path.suffix == ".py" and all(map(str.isidentifier, path.with_suffix("").parts))]
    packages = {path.parent for path in python if path.name == "__init__.py" and path.parent.parts}
    outer = {package for package in packages if not any(above in packages for above in package.parents)}
    single = {path.with_suffix("") for path in python if len(path.parts) == 1}
    return {".".join(path.parts) for path in outer | single}
