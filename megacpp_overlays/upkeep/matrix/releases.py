"""The releases of a distribution: which there are, when they came, and which file of each is read.

Data alone: asking an index is in `package_index`, getting a file is in `archives`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from megacpp_overlays.errors import UpkeepError

_MINOR = 12
"""The Python that wheels are chosen for where there is no pure one. They are read and never imported, so it only has
to be the same choice on every machine."""


_OLDEST = {"triton": Version("3.3.1"), "torch": Version("2.11.0"), "transformers": Version("5.23.0")}
"""Of distributions whose archives are large, the oldest release that is read: of triton the last one before the defect of
pack 43, of torch and transformers the one that the lanes have."""
SMALL_BUILDS = {"torch": ("macosx_14_0_arm64", "macosx_11_0_arm64")}
"""Of distributions whose wheels for Linux have half a gigabyte of kernels, the platforms whose wheels are read: their Python files are
the same but for `version.py` and a few that only builds for CUDA have."""


def is_read(distribution: str, version: str) -> bool:
    """Return whether a release has a row: all have, but for old ones of distributions whose archives are large."""
    return distribution not in _OLDEST or Version(version) >= _OLDEST[distribution]


def is_plain(name: str) -> bool:
    """Return whether a name that an index gave leads to no other folder."""
    return bool(name) and not name.startswith(".") and not set(name) & set("/\\\0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveFile:
    """One file of a release."""

    name: str
    sha256: str
    uploaded: str | None
    """Date in UTC, `2026-08-18`; None where the index does not say."""

    def __post_init__(self) -> None:
        if not is_plain(self.name):
            raise ValueError(f"{self.name!r} is no name of a file")

    @property
    def is_wheel(self) -> bool:
        """Whether it is a wheel; else it is a source distribution."""
        return self.name.endswith(".whl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One version of a distribution."""

    version: str
    yanked: str | None
    """Why all of its files were withdrawn, perhaps in no words; None where they were not."""
    files: tuple[ArchiveFile, ...]
    """Those that can be read and checked, the one that is read first."""

    @property
    def date(self) -> str | None:
        """When its first file was uploaded, as a date in UTC; None where the index does not say."""
        return min((file.uploaded for file in self.files if file.uploaded), default=None)

    @property
    def is_final(self) -> bool:
        """Whether it is neither a pre-release nor a development build."""
        return not Version(self.version).is_prerelease


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexAnswer:
    """What an index said about a distribution."""

    distribution: str
    asked: str
    """The date in UTC."""
    releases: tuple[Release, ...]
    """By version."""

    @property
    def read(self) -> tuple[Release, ...]:
        """Those that have a row; see `is_read`."""
        return tuple(each for each in self.releases if is_read(self.distribution, each.version))


def release(version: str, files: Iterable[ArchiveFile], yanked: str | None) -> Release:
    """Return a release, its files in the order in which they are tried."""
    return Release(version=version, yanked=yanked, files=tuple(sorted(files, key=_preference)))


def in_order(releases: Iterable[Release]) -> tuple[Release, ...]:
    """Return releases by version."""
    return tuple(sorted(releases, key=lambda each: Version(each.version)))


def _preference(file: ArchiveFile) -> tuple[int, bool, bool, int, str]:
    """Order the files of a release: a pure wheel, another wheel, a source distribution.

    Wheels of one release have the same Python files, so of several the one for x86-64 and the Python next to 3.12 is
    read on every machine; `SMALL_BUILDS` has exceptions.
    """
    if not file.is_wheel:
        return 2, False, False, 0, file.name
    try:
        name, _, _, tags = parse_wheel_filename(file.name)
    except InvalidWheelFilename:
        return 3, False, False, 0, file.name
    if any(tag.platform == "any" for tag in tags):
        return 0, False, False, 0, file.name
    minors = [
        int(tag.interpreter[3:]) for tag in tags if tag.interpreter[:3] == "cp3" and tag.interpreter[3:].isdigit()
    ]
    away = min((abs(minor - _MINOR) for minor in minors), default=99)
    newer = min(minors, default=99) > _MINOR
    small = SMALL_BUILDS.get(name, ())
    is_first = any(tag.platform in small if small else tag.platform.endswith("x86_64") for tag in tags)
    return 1, not is_first, newer, away, file.name


def to_data(answer: IndexAnswer) -> dict[str, Any]:
    """Return an answer as data for JSON; it holds no address."""
    return asdict(answer)


def from_data(data: Mapping[str, Any]) -> IndexAnswer:
    """Return the answer that was kept as data.

    Raises:
        UpkeepError: this is no such data.
    """
    try:
        releases = [
            release(str(Version(each["version"])), [ArchiveFile(**file) for file in each["files"]], each["yanked"])
            for each in data["releases"]
        ]
        return IndexAnswer(distribution=data["distribution"], asked=data["asked"], releases=in_order(releases))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UpkeepError(f"this is no kept answer of an index: {type(error).__name__}: {error}") from error
