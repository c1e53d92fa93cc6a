"""Read a lock: a requirements file in which every pin has its hashes.

The head of a lock says what it is for, in comments that `make lock` writes and that pip and uv pass over:

    # lane: current
    # python: 3.12
    # platform: x86_64-manylinux_2_28
    # inputs: the SHA-256 of what it was compiled from
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from megacpp_overlays.errors import LockError

_HEAD = re.compile(r"# (lane|python|platform|inputs): (\S+)")
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
    """Where the pin applies; None is everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lock:
    """One lock file."""

    path: Path
    lane: str
    """What the head says, or the name of the file."""
    python: str | None
    """`3.12`, or None where the head does not say."""
    platform: str | None
    inputs: str | None
    """SHA-256 of what the lock was compiled from."""
    pins: Mapping[str, Pin]
    """By canonical name; pins whose marker excludes this interpreter are left out."""

    def version(self, distribution: str) -> str | None:
        """Return the version that the lock pins, or None where it names no such distribution."""
        pin = self.pins.get(canonicalize_name(distribution))
        return pin.version if pin else None


def read(path: Path) -> Lock:
    """Read a lock.

    Raises:
        LockError: there is no such file, or a line of it is no pin with hashes; the text names the line.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise LockError(f"{path}: cannot read this lock: {reason}") from error
    head = {match[1]: match[2] for line in text.splitlines() if (match := _HEAD.fullmatch(line))}
    pins: dict[str, Pin] = {}
    for number, line in _logical_lines(text):
        pin = _pin(path, number, line)
        if pin.marker is not None and not pin.marker.evaluate():
            continue
        if pin.name in pins:
            raise LockError(f"{path}:{number}: {pin.name} is pinned twice")
        pins[pin.name] = pin
    if not pins:
        raise LockError(f"{path}: no pin in it; a lock is a requirements file with hashes, as `make lock` writes it")
    return Lock(
        path=path,
        lane=head.get("lane", path.stem),
        python=head.get("python"),
        platform=head.get("platform"),
        inputs=head.get("inputs"),
        pins=pins,
    )


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
        raise LockError(f"{path}:{number}: {requirement.name} has no hash, so nobody can tell which file was meant")
    return Pin(
        name=canonicalize_name(requirement.name),
        version=exact[0],
        hashes=frozenset(value.removeprefix("sha256:") for value in hashes),
        marker=requirement.marker,
    )
