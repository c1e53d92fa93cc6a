"""The contents and the destination of a filing: notes and files, and a thread that exists or is to be opened."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from pathlib import Path

from megacpp_overlays.repro import manifest, pack_file
from megacpp_overlays.repro.inventory import Pack
from megacpp_overlays.upkeep.filing.standing import PackStatus

_DIFFS = (".diff", ".patch")


class Way(enum.Enum):
    """How a pack is sent."""

    ISSUE = "new issue"
    PULL_REQUEST = "new pull request"
    COMMENT = "comment"
    UNKNOWN = "not known yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Filing:
    """How and where one pack is sent."""

    repository: str | None
    way: Way
    threads: tuple[str, ...] = ()
    """Open threads to comment on, as owner/name#number."""

    def __str__(self) -> str:
        if self.way is Way.COMMENT:
            return f"comment on {' or '.join(self.threads)}, and open no competing one"
        if self.way is Way.UNKNOWN:
            return "not known yet: its pack.toml says overlap, and none of its threads there is open"
        return f"{self.way.value} in {self.repository}"


def of(standing: PackStatus) -> Filing:
    """Return how a pack is sent: as a comment where a thread has it, else with its diff, else as an issue."""
    entry = standing.entry
    if entry["upstream"] == "overlap":
        found = tuple(each.name for each in standing.threads if each.repository == entry["repository"] and each.is_open)
        return Filing(repository=entry["repository"], way=Way.COMMENT if found else Way.UNKNOWN, threads=found)
    way = Way.PULL_REQUEST if diffs(standing.pack) else Way.ISSUE
    return Filing(repository=entry["repository"], way=way)


def attachments(pack: Pack) -> tuple[Path, ...]:
    """Return the files of a pack that are sent beside its notes, by name: all that stand in its folder itself."""
    found = pack.folder.iterdir()
    notes = {manifest.README, pack_file.NAME}
    return tuple(
        sorted(path for path in found if path.is_file() and path.name not in notes and not path.name.startswith("."))
    )


def diffs(pack: Pack) -> tuple[Path, ...]:
    """Return the proposed diffs of a pack, in the order in which they apply."""
    return tuple(path for path in attachments(pack) if path.suffix in _DIFFS)


def contents(pack: Pack) -> dict[str, str]:
    """Return the SHA-256 of everything that an approval is of, by name of the file."""
    files = (*(pack.folder / name for name in (manifest.README, pack_file.NAME)), *attachments(pack))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()}


def digest(standing: PackStatus) -> str:
    """Return the SHA-256 of what would be sent and where: when any of it changes, so does this."""
    lines = [str(of(standing)), *(f"{name} {value}" for name, value in sorted(contents(standing.pack).items()))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
