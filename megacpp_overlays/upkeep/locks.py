"""A lock: a requirements file in which every pin has its hashes.

The head of a lock describes its purpose, in comments that `make lock` writes and that pip and uv ignore:

    # lane: current
    # python: 3.12
    # platform: x86_64-manylinux_2_28    or `any`: every platform, from this Python on
    # inputs: the SHA-256 of the inputs that it was compiled from
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from megacpp_overlays.errors import LockError

ANY = "any"
"""The platform of a lock for every platform; its Python is then the oldest supported one."""
_HEAD = re.compile(r"# (lane|python|platform): (\S+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HASH = re.compile(r"\s--hash=(\S+)")
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One distribution of a lock."""

    name: str
    """Canonical name, `liger-kernel`."""
    version: str
    hashes: frozenset[str]
    """Hex SHA-256 of every file that may be installed."""
    marker: Marker | None
    """The condition for the pin to apply; None is always."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lock:
    """One lock file."""

    path: Path
    lane: str
    """The lane in the head, or the name of the file."""
    python: str | None
    """`3.12`, or None where the head has none. The oldest supported one where the platform is `any`."""
    platform: str | None
    pins: Mapping[str, Pin]
    """The pins that apply to this interpreter, or in the environment given to `within`, by canonical name."""
    lines: tuple[tuple[int, Pin], ...]
    """Every pin with the number of its line, regardless of its marker."""

    def within(self, environment: Mapping[str, str]) -> Lock:
        """Return the lock with the pins that apply in an environment.

        Args:
            environment: the values of all markers in the environment, such as `python_full_version`.

        Raises:
            LockError: no pin applies in the environment, or two pins of one distribution do.
        """
        return replace(self, pins=_applying(self.path, self.lines, environment))

    def version(self, distribution: str) -> str | None:
        """Return the version that the lock pins, or None where it names no such distribution."""
        pin = self.pins.get(canonicalize_name(distribution))
        return pin.version if pin else None


def read(path: Path) -> Lock:
    """Read a lock with the pins that apply to this interpreter; see `Lock.within` for another.

    Raises:
        LockError: there is no such file, or a line of it is no pin with hashes; the message names the line.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise LockError(f"{path}: cannot read this lock: {reason}") from error
    head = {match[1]: match[2] for line in text.splitlines() if (match := _HEAD.fullmatch(line))}
    lane = head.get("lane", path.stem)
    if not _NAME.fullmatch(lane):
        raise LockError(f"{path}: {lane!r} is no name of a lane: letters, digits, and `.`, `_`, `-` between them")
    lines = tuple((number, _pin(path, number, line)) for number, line in _logical_lines(text))
    if not lines:
        raise LockError(f"{path}: no pin in it; a lock is a requirements file with hashes, as `make lock` writes it")
    return Lock(
        path=path,
        lane=lane,
        python=head.get("python"),
        platform=head.get("platform"),
        pins=_applying(path, lines, {}),
        lines=lines,
    )


def same_version(one: str, other: str) -> bool:
    """Return whether two spellings, such as `1.0` and `1.0.0`, name one version."""
    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return one == other


def _applying(path: Path, lines: Sequence[tuple[int, Pin]], environment: Mapping[str, str]) -> dict[str, Pin]:
    """Return the pins whose marker holds; marker values that are missing in the environment come from this interpreter."""
    pins: dict[str, Pin] = {}
    for number, pin in lines:
        if pin.marker is not None and not pin.marker.evaluate(dict(environment)):
            continue
        if pin.name in pins:
            raise LockError(f"{path}:{number}: {pin.name} is pinned twice")
        pins[pin.name] = pin
    if not pins:
        raise LockError(f"{path}: no pin of it applies to this Python on this platform")
    return pins


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each requirement with the number of its first line: continued lines joined, comments left out."""
    start, parts = 0, list[str]()
    for number, raw in enumerate(text.splitlines(), start=1):
        line = re.sub(r"(^|\s)#.*", "", raw).rstrip()
        if not parts:
            start = number
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        parts.append(line)
        if joined := " ".join(parts).strip():
            yield start, joined
        parts = []
    if joined := " ".join(parts).strip():
        yield start, joined


def _pin(path: Path, number: int, line: str) -> Pin:
    hashes = _HASH.findall(line)
    if wrong := [value for value in hashes if not _SHA256.fullmatch(value)]:
        raise LockError(f"{path}:{number}: {wrong[0]} is no sha256 hash")
    try:
        requirement = Requirement(_HASH.sub("", line).strip())
    except InvalidRequirement as error:
        raise LockError(f"{path}:{number}: {line.split()[0]!r} is no pin: {error}") from error
    exact = [each.version for each in requirement.specifier if each.operator in {"==", "==="}]
    if len(requirement.specifier) != 1 or not exact or "*" in exact[0]:
        raise LockError(f"{path}:{number}: {requirement.name} is not pinned with == to one version")
    if not hashes:
        raise LockError(f"{path}:{number}: {requirement.name} has no hash, so the pinned file is ambiguous")
    return Pin(
        name=canonicalize_name(requirement.name),
        version=exact[0],
        hashes=frozenset(value.removeprefix("sha256:") for value in hashes),
        marker=requirement.marker,
    )
