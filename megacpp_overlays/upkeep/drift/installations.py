"""The distributions that are installed in this environment, with the origins in their metadata."""

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
    """The content of `direct_url.json`, which an installer writes only for distributions that are not from an index.

    Format: https://packaging.python.org/specifications/direct-url/. The hash of an archive is not read, because the installer
    checks it: `pip install --require-hashes`, `uv pip sync --require-hashes`.
    """

    url: str
    editable: bool = False
    is_folder: bool = False
    commit: str | None = None
    """Commit of the repository that the installer built from."""

    @property
    def folder(self) -> Path | None:
        """The local folder; None where the origin is no local folder."""
        parts = urlsplit(self.url)
        return Path(unquote(parts.path)) if parts.scheme == "file" and self.is_folder else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """One installed distribution."""

    name: str
    """Canonical name, `liger-kernel`."""
    version: str
    root: Path
    """The folder that holds its packages and its metadata, site-packages most often."""
    entries: tuple[RecordEntry, ...] | None
    """The lines of RECORD; None where there is no usable RECORD."""
    why_not: str | None
    """The reason why there is no usable RECORD."""
    origin: Origin | None
    installer: str
    """`pip`, `uv`, or empty."""
    top_levels: tuple[str, ...]
    """The names in `top_level.txt`, which setuptools writes; an editable install lists its packages nowhere else."""
    also: tuple[str, ...] = ()
    """Other versions whose metadata is in the same folder."""

    def path(self, file: str) -> Path:
        """Return the path of a file of RECORD."""
        return self.root / file

    def is_within(self, path: Path) -> bool:
        """Return whether a path is below the folder of this distribution, or below its environment.

        Links are not resolved, because an installer may link each file to its cache.
        """
        above = self.root.parents  # PREFIX/lib/python3.12/site-packages
        is_prefix = len(above) > 3 and above[1].name.startswith("lib")  # never the root of the file system
        folders = (self.root, above[2]) if is_prefix else (self.root,)
        named = os.path.join(os.path.normpath(path), "")  # as text: a RECORD has ten thousand of them
        return any(named.startswith(os.path.join(each, "")) for each in folders)


def find_all(path: Sequence[str] | None = None) -> Mapping[str, Installation]:
    """Return every installed distribution by canonical name; of duplicates, the first on the path.

    Args:
        path: folders to search; None is the path of this interpreter.

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
    why = f"the folder has metadata of {', '.join((first.version, *versions))}: an upgrade was left half done"
    return dataclasses.replace(first, why_not=why, entries=None, also=tuple(versions))


def _installation(distribution: importlib_metadata.Distribution) -> Installation:
    root = Path(str(distribution.locate_file(""))).resolve()
    try:
        _demand_files(distribution)
        name, version = str(distribution.metadata["Name"]), str(distribution.version)
        origin = _origin(distribution.read_text("direct_url.json"))
    except Exception as error:
        where = getattr(distribution, "_path", root)  # it has no public name
        raise UpkeepError(
            f"{where}: the metadata of this distribution cannot be read ({type(error).__name__}: {error}); "
            "reinstall it, or delete the folder if an installer left it behind"
        ) from error
    entries, why_not = _entries(distribution)
    return Installation(
        name=canonicalize_name(name),
        version=version,
        root=root,
        entries=entries,
        why_not=why_not,
        origin=origin,
        installer=(distribution.read_text("INSTALLER") or "").strip(),
        top_levels=tuple((distribution.read_text("top_level.txt") or "").split()),
    )


def _demand_files(distribution: importlib_metadata.Distribution) -> None:
    """Check that the metadata files are regular files, because reading a FIFO would block."""
    folder: object = getattr(distribution, "_path", None)  # it has no public name
    for path in (folder / name for name in _METADATA) if isinstance(folder, Path) else ():
        if path.exists() and not path.is_file():
            raise UpkeepError(f"{path.name} is no regular file")


def _entries(distribution: importlib_metadata.Distribution) -> tuple[tuple[RecordEntry, ...] | None, str | None]:
    text = distribution.read_text("RECORD")
    if not text:
        by = (distribution.read_text("INSTALLER") or "").strip()
        return None, f"it was installed without a RECORD{f' by {by}' if by else ''}"
    try:
        return records.parse(text), None
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
    """Return the outermost packages and modules that a distribution installs, such as `megatron.core`."""
    if installation.entries is None or (installation.origin and installation.origin.editable):
        return installation.top_levels
    return tuple(sorted(_outermost(PurePosixPath(entry.file) for entry in installation.entries)))


def _outermost(files: Iterable[PurePosixPath]) -> set[str]:
    python = [path for path in files if path.suffix == ".py" and all(map(str.isidentifier, path.with_suffix("").parts))]
    packages = {path.parent for path in python if path.name == "__init__.py" and path.parent.parts}
    outer = {package for package in packages if not any(above in packages for above in package.parents)}
    single = {path.with_suffix("") for path in python if len(path.parts) == 1}
    return {".".join(path.parts) for path in outer | single}
