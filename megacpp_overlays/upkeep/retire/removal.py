"""Take one overlay out of a copy of the checkout: what goes, what is rewritten, and what the package itself says then."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.loader import retired
from megacpp_overlays.loader.retired import Retired
from megacpp_overlays.loader.settings import LOG
from megacpp_overlays.model import Overlay
from megacpp_overlays.repro import inventory, receipts
from megacpp_overlays.repro.inventory import Pack
from megacpp_overlays.upkeep.retire import kept_matrices, leftovers
from megacpp_overlays.upkeep.retire import retirement_texts as texts
from megacpp_overlays.upkeep.retire.working_tree import files_below

RETIRED_FILE, LEDGER, CHANGELOG, README = (
    "megacpp_overlays/loader/retired.json",
    "RETIREMENT.md",
    "CHANGELOG.md",
    "README.md",
)
PACKS, MANIFEST = "packs", "packs/manifest.json"

_OVERLAYS, _PROBES = f"{leftovers.PACKAGE}.overlays", f"{leftovers.PACKAGE}.feature_probes"
_SPEAK_OF_IT = (RETIRED_FILE, LEDGER, CHANGELOG, MANIFEST)
"""Files that may name what is gone: they are its history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What goes with an overlay, and what is rewritten."""

    files: tuple[str, ...]
    """Its module, the probes that nobody else imports, and the tests that are named after the module."""
    pack: Pack
    left: tuple[str, ...]
    """Ids of the other overlays of the pack."""
    graph: Mapping[str, frozenset[str]]
    """What each file imported before."""

    @property
    def notes(self) -> str:
        """The notes of the pack."""
        return f"{PACKS}/{self.pack.name}/README.md"

    @property
    def touched(self) -> list[str]:
        """Every file that is removed or rewritten."""
        return [*self.files, RETIRED_FILE, LEDGER, CHANGELOG, README, MANIFEST, self.notes]


def plan(root: Path, files: Sequence[str], parts: Sequence[Overlay], overlays: Sequence[Overlay]) -> Removal:
    """Say what goes with an overlay.

    Args:
        root: the checkout.
        files: its files.
        parts: the overlay.
        overlays: every declared one, in parts.

    Raises:
        UpkeepError: its module is not in this checkout, as that of a plugin.
        PackError: it has no pack.
    """
    overlay = parts[0]
    package, _, module = overlay.retired.__module__.rpartition(".")
    path = f"overlays/{module}.py"
    if package != _OVERLAYS or path not in files:
        raise UpkeepError(
            f"{overlay.id} is declared in {overlay.retired.__module__}, which is no module of this checkout: whoever "
            "publishes that plugin retires it"
        )
    graph = leftovers.imports(root, files)
    probes = [
        probe
        for probe in files
        if (name := leftovers.module_name(probe)).startswith(f"{_PROBES}.")
        and name in graph[path]
        and all(other == path or other.startswith("tests/") for other in leftovers.importers(graph, name))
    ]
    others = [PurePosixPath(name).stem for name in files if name.startswith("overlays/")]
    tests = leftovers.named_after(module, others, files)
    left = dict.fromkeys(o.id for o in overlays if o.pack == overlay.pack and o.id != overlay.id)
    return Removal(
        files=tuple(dict.fromkeys([path, *probes, *tests])),
        pack=inventory.find(root / PACKS, overlay.pack),
        left=tuple(left),
        graph=graph,
    )


def edit(copy: Path, removal: Removal, gone: Retired, reason: str) -> None:
    """Remove the files and rewrite what people read.

    Args:
        copy: a copy of the checkout.
        removal: what goes.
        gone: the entry that stays.
        reason: for the changelog.

    Raises:
        UpkeepError: a file is not there, or has not what is rewritten in it.
    """
    for name in removal.files:
        (copy / name).unlink()
    entry = f"Overlay `{gone.id}` (pack {gone.pack:02}): {reason}"
    rewritten = {
        RETIRED_FILE: retired.to_json([*retired.read(), gone]),
        CHANGELOG: texts.with_removal(_read(copy, CHANGELOG), entry),
        README: texts.without_row(_read(copy, README), gone.id),
        removal.notes: texts.of_pack(_read(copy, removal.notes), gone, removal.left),
    }
    for name, text in rewritten.items():
        (copy / name).write_text(text)


def _read(copy: Path, name: str) -> str:
    try:
        return (copy / name).read_text()
    except OSError as error:
        raise UpkeepError(f"{name} cannot be read: {error.strerror}") from error


def bring_in_step(copy: Path, kept: Path | None) -> None:
    """Let the package of the copy write its ledger and its manifest, and check both.

    Args:
        copy: a copy of the checkout, edited.
        kept: a folder of packs with the receipt of the run that showed the bug gone, or None.

    Raises:
        UpkeepError: a check does not hold; the text is what it says.
        ManifestError: the receipt cannot be taken in.
    """
    if kept is not None:
        receipts.adopt(kept, copy / PACKS)
    for arguments in (["ledger", "--write", LEDGER], ["ledger", "--check", LEDGER], ["receipts", "--sync"]):
        _package_of(copy, arguments)


def _package_of(copy: Path, arguments: Sequence[str]) -> None:
    ours = ("MEGACPP_OVERLAY", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {LOG: "logging", "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(  # noqa: S603 - this interpreter and a copy of this package
        [sys.executable, "-m", leftovers.PACKAGE, *arguments],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = "; ".join((done.stderr.strip() or done.stdout.strip()).splitlines())
        raise UpkeepError(f"without the overlay, `megacpp-overlays {' '.join(arguments)}` does not hold: {said}")


def _may_speak_of_it(name: str) -> bool:
    return name in _SPEAK_OF_IT or "/receipts/" in name or PurePosixPath(name).name in kept_matrices.NAMES


def mentions(copy: Path, removal: Removal, overlay: Overlay) -> list[str]:
    """Return what still names the overlay or a removed file, as `path:line: text`; its history is left out.

    Args:
        copy: the copy, edited.
        removal: what went.
        overlay: any part of the overlay.
    """
    files = sorted(name for name in files_below(copy) if not _may_speak_of_it(name))
    elsewhere = [name for name in files if not name.startswith(f"{PACKS}/{removal.pack.name}/")]
    found = leftovers.mentions(copy, elsewhere, {overlay.id, overlay.variable})
    found += leftovers.mentions(copy, files, {PurePosixPath(name).stem for name in removal.files})
    if not removal.left:  # whoever runs its reproducer may still expect the bug
        found += leftovers.runs_of(copy, [name for name in elsewhere if name.endswith(".py")], overlay.pack)
    return list(map(str, dict.fromkeys(sorted(found, key=lambda each: (each.path, each.line)))))
