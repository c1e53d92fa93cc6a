"""The differences that the inventory accounts for: the `[[diffs]]` of `pack.toml`."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.repro import inventory, pack_file
from megacpp_overlays.repro.pack_file import Diff
from megacpp_overlays.upkeep.drift.published import FileDifference
from megacpp_overlays.upkeep.drift.records import Kind


class DriftState(enum.Enum):
    """State of a difference, or of a whole distribution."""

    CLEAN = "clean"
    TRACKED = "tracked"
    """It differs, and an entry of the inventory accounts for every difference."""
    UNTRACKED = "untracked"
    """It differs, and no entry accounts for a difference."""
    UNCHECKED = "cannot be checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackDiff:
    """One `[[diffs]]` entry with its pack."""

    pack: str
    """Name of the folder."""
    diff: Diff

    @property
    def key(self) -> tuple[str, str]:
        """Distribution by canonical name, and file."""
        return canonicalize_name(self.diff.distribution), self.diff.file


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One difference, and whether an entry of the inventory accounts for it."""

    distribution: str
    file: str
    kind: Kind
    sha256: str | None
    """Of the file as it is now."""
    state: DriftState
    pack: str | None
    note: str

    @property
    def block(self) -> str | None:
        """The `[[diffs]]` entry that would account for the difference; None where it is tracked, or has no hash."""
        if self.state is not DriftState.UNTRACKED or self.sha256 is None:
            return None
        fields = {"distribution": self.distribution, "file": self.file, "sha256": self.sha256}
        return "\n".join(("[[diffs]]", *(f"{name} = {_in_toml(text)}" for name, text in fields.items())))


def _in_toml(text: str) -> str:
    # A JSON string is a TOML string, but for characters that are not printable.
    written = json.dumps(text, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in written)


def read(folder: Path) -> tuple[PackDiff, ...]:
    """Return the local changes that the packs below a folder account for.

    Raises:
        UpkeepError: there is no such folder.
        PackError: a `pack.toml` is not valid.
    """
    if not folder.is_dir():
        raise UpkeepError(f"--packs {folder}: there is no such folder")
    return tuple(
        PackDiff(pack=pack.name, diff=diff)
        for pack in inventory.list_packs(folder)
        if (pack.folder / pack_file.NAME).is_file()
        for diff in pack_file.read(pack.folder).diffs
    )


def account(
    distribution: str, differences: Sequence[FileDifference], entries: Sequence[PackDiff]
) -> tuple[Account, ...]:
    """Return each difference of a distribution as tracked or untracked."""
    by_key: dict[tuple[str, str], list[PackDiff]] = {}
    for entry in entries:
        by_key.setdefault(entry.key, []).append(entry)
    return tuple(_account_of(distribution, each, by_key) for each in differences)


def _account_of(distribution: str, found: FileDifference, by_key: Mapping[tuple[str, str], list[PackDiff]]) -> Account:
    entries = by_key.get((distribution, found.file), [])
    match = next((entry for entry in entries if entry.diff.sha256 == found.sha256), None)
    packs = ", ".join(dict.fromkeys(entry.pack for entry in entries))
    return Account(
        distribution=distribution,
        file=found.file,
        kind=found.kind,
        sha256=found.sha256,
        state=DriftState.TRACKED if match else DriftState.UNTRACKED,
        pack=match.pack if match else None,
        note="" if match or not packs else f"{packs} accounts for another version of this file",
    )


def stale(entries: Sequence[PackDiff], checked: Mapping[str, Sequence[FileDifference]]) -> tuple[PackDiff, ...]:
    """Return the entries of checked distributions whose file is as published."""
    differing = {(name, each.file) for name, found in checked.items() for each in found}
    return tuple(entry for entry in entries if entry.key[0] in checked and entry.key not in differing)
