"""The files that belong to a retired overlay and the lines that name it, for a person to remove.

Nothing is removed or rewritten here. The owner of a file is inferred from names alone; in doubt a file is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.model import Erratum
from megacpp_overlays.repro import inventory
from megacpp_overlays.repro.inventory import Pack

RETIRED = "megacpp_overlays/loader/retired.json"
_HISTORY = ("RETIREMENT.md", "CHANGELOG.md", RETIRED, "packs/manifest.json")
"""Files that continue to name a retired overlay."""
_PROBES, _KERNELS, _TESTS = "feature_probes/", "megacpp_overlays/kernels/", "tests/"
_GENERATED = ("matrix.json", "matrix.html", "reproduce.py")
"""Names of files that are regenerated, or that receipts are bound to; a retirement does not edit them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leavings:
    """The files and mentions of an overlay that are left in a checkout."""

    pack: Pack
    siblings: tuple[str, ...]
    """Ids of the other overlays of the pack."""
    files: tuple[str, ...]
    """The overlay's module, the probes that only it uses, and the tests that are named after it."""
    unused: tuple[str, ...]
    """Kernels that no other file names. They may be useful elsewhere, so a person decides."""
    mentions: tuple[str, ...]
    """Lines that name the overlay or one of its files, as `path:line: text`."""


def find(root: Path, tracked: Iterable[str], overlay: Erratum, overlays: Iterable[Erratum]) -> Leavings:
    """Return the files and mentions that are left of an overlay.

    Args:
        root: the checkout.
        tracked: the paths of its tracked files, relative to the checkout.
        overlay: any part of the overlay that retires.
        overlays: every declared overlay.

    Raises:
        UpkeepError: the overlay's module is not in this checkout, such as that of a plugin.
        PackError: the overlay has no pack.
    """
    module = overlay.id.replace("-", "_")
    own = f"overlays/{module}.py"
    texts = {name: text for name in tracked if (text := _text(root / name)) is not None}
    if own not in texts:
        raise UpkeepError(
            f"there is no {own} in this checkout: the publisher of the plugin with {overlay.id} retires it"
        )
    pack = inventory.find(root / "packs", overlay.pack)
    probes = _used_by_it_alone(own, texts, _PROBES)
    files = (own, *probes, *_named_after(module, texts))
    siblings = tuple(dict.fromkeys(each.id for each in overlays if each.pack == pack.number and each.id != overlay.id))
    words = [overlay.id, overlay.variable, *dict.fromkeys(PurePosixPath(name).stem for name in files)]
    patterns = [rf"(?<![\w-])(?:{'|'.join(map(re.escape, words))})(?![\w-])"]
    if not siblings:  # texts that run its reproducer may still expect the bug
        patterns.append(rf"\brepro\W{{1,4}}0?{pack.number}\b")
    there = {name: text for name, text in texts.items() if name not in files and not _is_history(name)}
    return Leavings(
        pack=pack,
        siblings=siblings,
        files=files,
        unused=_used_by_it_alone(own, texts, _KERNELS),
        mentions=tuple(_mentions(there, re.compile("|".join(patterns)))),
    )


def _text(path: Path) -> str | None:
    try:
        return None if path.is_symlink() else path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _used_by_it_alone(own: str, texts: Mapping[str, str], folder: str) -> tuple[str, ...]:
    """Return the modules of a folder that a file names and that no other Python file names, except tests."""
    modules = (name for name in sorted(texts) if name.startswith(folder) and name.endswith(".py"))
    named = (name for name in modules if PurePosixPath(name).stem in texts[own])
    return tuple(name for name in named if _users(name, texts) == {own})


def _users(module: str, texts: Mapping[str, str]) -> set[str]:
    word = re.compile(rf"\b{re.escape(PurePosixPath(module).stem)}\b")
    others = (name for name in texts if name.endswith(".py") and name != module and not name.startswith(_TESTS))
    return {name for name in others if word.search(texts[name])}


def _named_after(module: str, texts: Iterable[str]) -> tuple[str, ...]:
    """Return the tests that are named after a module: `test_x.py`, `test_x_probe.py`; not tests of a module with a longer name."""
    names = sorted(texts)
    longer = [stem for name in names if name.startswith("overlays/") and (stem := PurePosixPath(name).stem) > module]
    return tuple(
        name
        for name in names
        if name.startswith(_TESTS)
        and _is_about(name, module)
        and not any(_is_about(name, other) for other in longer if other.startswith(f"{module}_"))
    )


def _is_about(test: str, module: str) -> bool:
    return bool(re.fullmatch(rf"test_{re.escape(module)}(?:_\w+)?\.py", PurePosixPath(test).name))


def _is_history(name: str) -> bool:
    return name in _HISTORY or "/receipts/" in name or PurePosixPath(name).name in _GENERATED


def _mentions(texts: Mapping[str, str], pattern: re.Pattern[str]) -> Iterator[str]:
    for name in sorted(texts):
        for number, line in enumerate(texts[name].splitlines(), start=1):
            if pattern.search(line):
                yield f"{name}:{number}: {line.strip()}"
