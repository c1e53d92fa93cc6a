"""Inventory of packs: their folders by number, and the cases of their reproducers.

A pack is a folder `NN-slug`. Its `reproduce.py` is loaded from its path, so no folder of the inventory is ever on
`sys.path`.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_overlays import packs as own
from megacpp_overlays.loader import retired
from megacpp_overlays.model import Erratum, Target
from megacpp_overlays.near_names import suggestion
from megacpp_overlays.repro import neighbour
from megacpp_overlays.repro.case import Case, PackError

MORE = "more_cases.py"
"""File for cases that a pack gets after its first receipts. A receipt is valid only for the same bytes of `reproduce.py`."""
_FOLDER = re.compile(r"(\d\d)-([a-z0-9]+(?:-[a-z0-9]+)*)")


@dataclass(frozen=True, slots=True)
class Pack:
    """One folder of the inventory."""

    folder: Path
    number: int
    slug: str

    @property
    def name(self) -> str:
        """Name of the folder, `09-liger-flce-none-backward`."""
        return self.folder.name

    @property
    def reproducer(self) -> Path:
        """File with the cases."""
        return self.folder / "reproduce.py"


def own_folder() -> Path:
    """Return the folder of the packs that are installed with this package."""
    return Path(str(own.__file__)).resolve().parent


def list_packs(folder: Path) -> tuple[Pack, ...]:
    """Return the packs in a folder, by number; none if the folder does not exist.

    Raises:
        PackError: two folders have the same number.
    """
    found = [
        Pack(path, int(name[1]), name[2])
        for path in (sorted(folder.iterdir()) if folder.is_dir() else ())
        if path.is_dir() and (name := _FOLDER.fullmatch(path.name))
    ]
    for number, count in Counter(pack.number for pack in found).items():
        if count > 1:
            raise PackError(f"{count} packs have the number {number:02}")
    return tuple(found)


def find(folder: Path, number: int) -> Pack:
    """Return a pack by its number.

    Raises:
        PackError: there is none, or two folders have the same number.
    """
    every = list_packs(folder)
    for pack in every:
        if pack.number == number:
            return pack
    raise PackError(
        f"there is no pack {number:02}; `megacpp-overlays repro --list` lists the {len(every)} that there are"
    )


def digest(reproducer: Path) -> str:
    """Return the first 12 hexadecimal digits of the SHA-256 of a `reproduce.py`; empty if the file does not exist."""
    return hashlib.sha256(reproducer.read_bytes()).hexdigest()[:12] if reproducer.is_file() else ""


def load_cases(reproducer: Path) -> tuple[Case, ...]:
    """Execute a `reproduce.py` and return its cases, with those of the `more_cases.py` in the same folder.

    Raises:
        PackError: there is no such file, one of the two cannot be executed or declares no valid CASES, or two cases have
            the same name.
    """
    where = f"{reproducer.parent.name}/{reproducer.name}"
    if not reproducer.is_file():
        raise PackError(f"there is no {where}")
    try:
        module = neighbour.load_file(reproducer)
    except Exception as error:
        raise PackError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    cases = getattr(module, "CASES", None)
    if not isinstance(cases, tuple) or not cases or not all(isinstance(case, Case) for case in cases):
        raise PackError(f"{where} declares no CASES, a tuple of Case")
    if reproducer.name != MORE and (more := reproducer.with_name(MORE)).is_file():
        cases += load_cases(more)
    for case_name, count in Counter(case.name for case in cases).items():
        if count > 1:
            raise PackError(f"{where} declares {count} cases {case_name}")
    return cases


def choose(cases: Sequence[Case], name: str) -> Case:
    """Return a case by name.

    Raises:
        PackError: there is none; the text suggests names that are near, or lists all names if they are few.
    """
    for case in cases:
        if case.name == name:
            return case
    raise PackError(
        f"there is no case {name}; {suggestion(name, [case.name for case in cases], where='`megacpp-overlays repro --list`')}"
    )


def parts_of(case: Case, overlays: Sequence[Erratum]) -> tuple[Erratum, ...]:
    """Return the parts of the overlay that a case is about; none for a claim, or if the overlay is retired.

    Raises:
        PackError: neither an active nor a retired overlay has this id, or it has no target in a module that the case names.
    """
    chosen = targets_of(case, overlays)
    return tuple(part for part in overlays if part.id == case.overlay and part.target in chosen)


def targets_of(case: Case, overlays: Sequence[Erratum]) -> tuple[Target, ...]:
    """Return the targets that a case is about, those of a retired overlay included.

    Raises:
        PackError: as `parts_of`.
    """
    if case.overlay is None:
        return case.about
    targets = [overlay.target for overlay in overlays if overlay.id == case.overlay]
    if not targets and (gone := retired.find(case.overlay)) is not None:
        targets = list(gone.targets)
    if not targets:
        raise PackError(f"case {case.name}: there is no overlay {case.overlay}")
    modules = {target.module for target in targets}
    if unknown := set(case.targets) - modules:
        raise PackError(f"case {case.name}: {case.overlay} has no target {', '.join(sorted(unknown))}")
    return tuple(target for target in targets if not case.targets or target.module in case.targets)
