"""The releases of a distribution, their dates, and the choice of the file to read of each.

This module holds data only: `package_index` asks an index, `archives` fetches files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from megacpp_overlays.errors import UpkeepError

_MINOR = 12
"""The minor version of Python that wheels are chosen for where there is no pure wheel. Wheels are read and never imported, so
the choice only has to be the same on every machine."""


_OLDEST = {"triton": Version("3.3.1"), "torch": Version("2.11.0"), "transformers": Version("5.23.0")}
"""The oldest release that is read of each distribution with large archives: of triton the last one before the defect of
pack 43, of torch and transformers the one that the lanes have."""
SMALL_BUILDS = {"torch": ("macosx_14_0_arm64", "macosx_11_0_arm64")}
"""The platforms whose wheels are read of distributions whose Linux wheels have half a gigabyte of kernels. The Python files are
the same except for `version.py` and a few that only builds for CUDA have."""


def is_read(distribution: str, version: str) -> bool:
    """Return whether a release has a row; only old releases of distributions with large archives have none."""
    return distribution not in _OLDEST or Version(version) >= _OLDEST[distribution]


def is_plain(name: str) -> bool:
    """Return whether a file name from an index cannot lead to another folder."""
    return bool(name) and not name.startswith(".") and not set(name) & set("/\\\0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveFile:
    """One file of a release."""

    name: str
    sha256: str
    uploaded: str | None
    """Date of the upload in UTC, `2026-08-18`; None where the index gives none."""

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
    """The reason why all of its files were withdrawn, possibly empty; None where they were not withdrawn."""
    files: tuple[ArchiveFile, ...]
    """The files that can be read and checked, in order of preference."""

    @property
    def date(self) -> str | None:
        """The date in UTC of the first upload; None where the index gives none."""
        return min((file.uploaded for file in self.files if file.uploaded), default=None)

    @property
    def is_final(self) -> bool:
        """Whether it is neither a pre-release nor a development build."""
        return not Version(self.version).is_prerelease


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexAnswer:
    """The answer of an index about a distribution."""

    distribution: str
    asked: str
    """The date of the query in UTC."""
    releases: tuple[Release, ...]
    """Releases, ordered by version."""

    @property
    def read(self) -> tuple[Release, ...]:
        """The releases that have a row; see `is_read`."""
        return tuple(each for each in self.releases if is_read(self.distribution, each.version))


def release(version: str, files: Iterable[ArchiveFile], yanked: str | None) -> Release:
    """Return a release with its files in order of preference."""
    return Release(version=version, yanked=yanked, files=tuple(sorted(files, key=_preference)))


def in_order(releases: Iterable[Release]) -> tuple[Release, ...]:
    """Return releases sorted by version."""
    return tuple(sorted(releases, key=lambda each: Version(each.version)))


def _preference(file: ArchiveFile) -> tuple[int, bool, bool, int, str]:
    """Order the files of a release: a pure wheel, another wheel, a source distribution.

    Wheels of one release have the same Python files. So every machine reads the wheel for x86-64 whose Python is closest
    to 3.12; `SMALL_BUILDS` has exceptions.
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
        UpkeepError: the data is no kept answer.
    """
    try:
        releases = [
            release(str(Version(each["version"])), [ArchiveFile(**file) for file in each["files"]], each["yanked"])
            for each in data["releases"]
        ]
        return IndexAnswer(distribution=data["distribution"], asked=data["asked"], releases=in_order(releases))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UpkeepError(f"this is no kept answer of an index: {type(error).__name__}: {error}") from error
