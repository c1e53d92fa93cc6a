"""Is each installed distribution the artifact that a lock names?

A lock has hashes of archives, and an installed environment has none: installers keep the hash of an archive only where
it was installed by its own URL (`direct_url.json`; the proposal to keep it for what comes from an index, PEP 710, is a
draft). But a wheel carries a RECORD of its content, and an installer copies it, adding only what it makes itself. So an
installation is told by its RECORD: it has to be the one inside a wheel whose SHA-256 the lock names.

The hash of METADATA that an index publishes (PEP 658) would need no download of wheels and say less: two builds of one
version may have the same METADATA.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.tags import Tag, sys_tags
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from megacpp_overlays.errors import LockError, UpkeepError
from megacpp_overlays.upkeep.drift import records
from megacpp_overlays.upkeep.drift.installations import Installation
from megacpp_overlays.upkeep.drift.records import Entry
from megacpp_overlays.upkeep.locks import ANY, Lock, Pin

_SHOWN = 3
_BY_INSTALLERS = frozenset(
    {"INSTALLER", "REQUESTED", "RECORD", "RECORD.jws", "RECORD.p7s", "direct_url.json", "provenance_url.json"}
)
_SCRIPTS = frozenset({"bin", "Scripts"})


class Identity(enum.Enum):
    """What a pin and an installation are to each other."""

    SAME = "as locked"
    OTHER = "another artifact"
    UNKNOWN = "identity not checked"
    VERSION = "another version"
    MISSING = "not installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One file of an index, on disk."""

    path: Path
    tags: frozenset[Tag] | None
    """What a wheel supports; None for a source archive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One pin, and what is installed."""

    name: str
    locked: str
    installed: str | None
    identity: Identity
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """An environment against its lock."""

    lane: str
    pins: tuple[Checked, ...]
    extra: tuple[str, ...]
    """What is installed and not locked, as `name==version`."""

    def having(self, *identities: Identity) -> tuple[Checked, ...]:
        """Return the pins that came out so."""
        return tuple(each for each in self.pins if each.identity in identities)

    @property
    def wrong(self) -> tuple[Checked, ...]:
        """The pins that the environment contradicts."""
        return self.having(Identity.OTHER, Identity.VERSION, Identity.MISSING)


def merge(locks: Sequence[Lock]) -> Lock:
    """Return several locks of one lane as one: what is built from source is often locked apart.

    Raises:
        LockError: they do not agree on a version.
    """
    first, *others = locks
    pins = dict(first.pins)
    for lock in others:
        for name, pin in lock.pins.items():
            known = pins.setdefault(name, pin)
            if not _same_version(known.version, pin.version):
                raise LockError(f"{lock.path}: it pins {name} {pin.version}, and another lock {known.version}")
            pins[name] = dataclasses.replace(known, hashes=known.hashes | pin.hashes)
    return dataclasses.replace(first, pins=pins)


def compare(lock: Lock, installed: Mapping[str, Installation], folders: Sequence[Path] = ()) -> Comparison:
    """Compare an environment with a lock.

    Args:
        lock: the lock.
        installed: everything that is installed.
        folders: where artifacts are; only files that are named as a pin, and have a hash of it, count.

    Raises:
        LockError: the lock is for another Python.
        UpkeepError: there is no such folder.
    """
    python = ".".join(map(str, sys.version_info[:2]))
    if lock.platform != ANY and lock.python not in {None, python}:  # of every platform, it is from this Python on
        raise LockError(
            f"{lock.path}: it is for Python {lock.python}, and this is {python}: use the Python of the lane"
        )
    found = _artifacts(lock, folders)
    pins = tuple(_checked(pin, installed.get(name), found.get(name, ())) for name, pin in sorted(lock.pins.items()))
    extra = sorted(f"{each.name}=={each.version}" for name, each in installed.items() if name not in lock.pins)
    return Comparison(lane=lock.lane, pins=pins, extra=tuple(extra))


def _checked(pin: Pin, here: Installation | None, artifacts: Sequence[Artifact]) -> Checked:
    identity, why = _identity(pin, here, artifacts)
    version = here.version if here else None
    return Checked(name=pin.name, locked=pin.version, installed=version, identity=identity, why=why)


def _identity(pin: Pin, here: Installation | None, artifacts: Sequence[Artifact]) -> tuple[Identity, str]:
    if here is None:
        return Identity.MISSING, "it is locked and not installed"
    if not _same_version(pin.version, here.version):
        return Identity.VERSION, f"{here.version} is installed"
    if here.origin is not None:
        if here.origin.sha256 is None and (here.origin.is_folder or here.origin.commit):
            return Identity.OTHER, f"it was installed from {here.origin.url}, which is no locked artifact"
        if here.origin.sha256 is not None and here.origin.sha256 not in pin.hashes:
            return Identity.OTHER, f"it was installed from {here.origin.url}, whose hash the lock does not name"
    if here.entries is None:
        return Identity.UNKNOWN, here.why_not or "it has no RECORD"
    identity, why = _by_record(here.entries, artifacts)
    if identity is Identity.UNKNOWN and here.origin is not None and here.origin.sha256 is not None:
        return Identity.SAME, f"its installer noted {here.origin.url}, whose hash the lock names"
    return identity, why


def _same_version(one: str, other: str) -> bool:
    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return one == other


def _by_record(entries: Sequence[Entry], artifacts: Sequence[Artifact]) -> tuple[Identity, str]:
    supported = frozenset(sys_tags())
    wheels = [each for each in artifacts if each.tags is not None]
    here = [each for each in wheels if each.tags and each.tags & supported]
    differences: list[str] = []
    for wheel in here:
        files = first_differences(entries, _record_inside(wheel.path))
        if not files:
            return Identity.SAME, f"its RECORD is that of {wheel.path.name}"
        more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
        differences.append(f"{wheel.path.name} has other content in {', '.join(files[:_SHOWN])}{more}")
    if differences:
        return Identity.OTHER, "; ".join(differences)
    if wheels:
        return Identity.UNKNOWN, f"{wheels[0].path.name} is for another platform"
    if artifacts:
        return Identity.UNKNOWN, f"{artifacts[0].path.name} is a source: what was built from it is not in the lock"
    return Identity.UNKNOWN, "its artifact is not in --wheels"


def first_differences(installed: Iterable[Entry], published: Iterable[Entry]) -> list[str]:
    """Return the files whose lines differ between an installed RECORD and the one inside a wheel, sorted.

    Passed over is what installers make: their notes, scripts, bytecode, and the lines of RECORD itself.
    """
    ours = {entry.file: _content(entry) for entry in installed if not _is_made(entry)}
    theirs = dict(_placed(entry, ours) for entry in published if not _is_made(entry) and not _is_script(entry.file))
    return sorted(file for file in {*ours, *theirs} if ours.get(file) != theirs.get(file))


def _content(entry: Entry) -> tuple[str, str]:
    return entry.algorithm, entry.digest


def _is_made(entry: Entry) -> bool:
    path = PurePosixPath(entry.file)
    if records.is_bytecode(path):
        return True
    if path.parent.suffix == ".dist-info":
        return path.name in _BY_INSTALLERS or (path.name.startswith("uv_") and path.suffix == ".json")
    return path.parts[0] == ".." and path.parent.name in _SCRIPTS


def _is_script(file: str) -> bool:
    """Return whether a file of a wheel goes among the scripts: an installer rewrites their first line, or makes them."""
    path = PurePosixPath(file)
    if len(path.parts) < 3 or not path.parts[0].endswith(".data") or path.parts[1] in {"purelib", "platlib"}:
        return False
    return path.parts[1] == "scripts" or path.parent.name in _SCRIPTS


def _placed(entry: Entry, ours: Mapping[str, tuple[str, str]]) -> tuple[str, tuple[str, str]]:
    """Return a line of a wheel with the path that its file has when installed.

    Only the installer knows where the folders `data` and `headers` of a wheel go, so their files are found by name.
    """
    data, _, rest = entry.file.partition("/")
    scheme, _, inside = rest.partition("/")
    if not data.endswith(".data") or not inside:
        return entry.file, _content(entry)
    if scheme in {"purelib", "platlib"}:
        return inside, _content(entry)
    outside = (file for file in ours if file.startswith("..") and file.endswith(f"/{inside}"))
    return next(outside, entry.file), _content(entry)


def _record_inside(wheel: Path) -> tuple[Entry, ...]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [each for each in archive.namelist() if each.count("/") == 1 and each.endswith(".dist-info/RECORD")]
            return records.parse(archive.read(names[0]).decode())
    except (OSError, zipfile.BadZipFile, IndexError, UnicodeDecodeError) as error:
        raise UpkeepError(f"{wheel}: no RECORD can be read in it: {error}") from error


def _artifacts(lock: Lock, folders: Sequence[Path]) -> Mapping[str, Sequence[Artifact]]:
    """Return the artifacts of each pin that are at hand."""
    found: dict[str, list[Artifact]] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UpkeepError(f"--wheels {folder}: there is no such folder")
        for path in sorted(folder.iterdir()):
            name, version, tags = _named(path)
            pin = lock.pins.get(name)
            # The name decides first: hashing every file of a folder takes minutes.
            if pin is not None and _same_version(pin.version, version) and records.sha256(path) in pin.hashes:
                found.setdefault(name, []).append(Artifact(path=path, tags=tags))
    return found


def _named(path: Path) -> tuple[str, str, frozenset[Tag] | None]:
    try:
        if path.suffix == ".whl":
            name, version, _, tags = parse_wheel_filename(path.name)
            return canonicalize_name(name), str(version), tags
        name, version = parse_sdist_filename(path.name)
        return canonicalize_name(name), str(version), None
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return "", "", None


def strangers(comparison: Comparison) -> Iterator[str]:
    """Yield what is installed beside the lock, without what keeps an environment: this package and its installers."""
    usual = {"megacpp-overlays", "pip", "setuptools", "wheel", "uv"}
    yield from (each for each in comparison.extra if each.partition("==")[0] not in usual)
