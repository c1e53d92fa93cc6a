"""What still names something that was removed, and what nobody uses any more. It is listed and never edited.

Tests, examples and pages were written by hand, and only a person can say what they should say now.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PACKAGE = "megacpp_overlays"
_MAPPED = {"overlays": f"{PACKAGE}.overlays", "feature_probes": f"{PACKAGE}.feature_probes"}
"""Folders of a checkout that are installed as parts of the package."""


@dataclass(frozen=True, slots=True)
class Mention:
    """One line that names what is gone."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text.strip()}"


def mentions(root: Path, files: Iterable[str], words: Collection[str]) -> list[Mention]:
    """Return the lines of text files that have one of these words; part of a longer word does not count."""
    return _lines(root, files, re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, sorted(words)))})(?![\w-])"))


def runs_of(root: Path, files: Iterable[str], number: int) -> list[Mention]:
    """Return the lines that run the reproducer of a pack: `repro("9", ...)`, `"repro", "9"`, `repro 9`."""
    return _lines(root, files, re.compile(rf"\brepro\W{{1,4}}0?{number}\b"))


def _lines(root: Path, files: Iterable[str], pattern: re.Pattern[str]) -> list[Mention]:
    found = []
    for name in files:
        if (text := _text(root / name)) is not None and pattern.search(text):
            lines = enumerate(text.split("\n"), start=1)
            found += [Mention(name, number, line) for number, line in lines if pattern.search(line)]
    return found


def _text(path: Path) -> str | None:
    if path.is_symlink() or not path.is_file():
        return None
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return None


def imports(root: Path, files: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return which modules each Python file imports, by path; `from a import b` is a and a.b.

    A file that is no Python yet, as one that somebody is writing, imports nothing.
    """
    found = {}
    for name in files:
        if name.endswith(".py") and (text := _text(root / name)) is not None:
            found[name] = frozenset(_imported(text))
    return found


def _imported(text: str) -> Iterator[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # ValueError: a null byte, before Python 3.12
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_name(path: str) -> str:
    """Return the name under which a file of the checkout is imported: `overlays/x.py` is megacpp_overlays.overlays.x."""
    top, *rest = PurePosixPath(path).with_suffix("").parts
    if not rest:
        return top
    if top == "tests":
        return rest[-1]  # the folder is on the path of pytest
    return ".".join([_MAPPED.get(top, top), *(part for part in rest if part != "__init__")])


def unused(before: Mapping[str, Collection[str]], removed: Collection[str]) -> list[str]:
    """Return the files that were imported by others before some were removed, and are by none since.

    A file that only such files import is one of them, too.

    Args:
        before: what each file imports, by path, with those that were removed.
        removed: paths.
    """
    gone = set(removed)
    used = _used(before)
    while True:
        still = _used({path: names for path, names in before.items() if path not in gone})
        orphans = {path for path in before if path not in gone and path in used and path not in still}
        if not orphans:
            return sorted(path for path in gone - set(removed) if not path.endswith("/__init__.py"))
        gone |= orphans


def _used(graph: Mapping[str, Collection[str]]) -> set[str]:
    """Return the files that another one imports."""
    names = {module_name(path): path for path in graph}
    return {names[name] for path, imported in graph.items() for name in imported if names.get(name, path) != path}


def importers(graph: Mapping[str, Collection[str]], module: str) -> list[str]:
    """Return the files that import a module."""
    return sorted(path for path, names in graph.items() if module in names and module_name(path) != module)


def named_after(module: str, others: Sequence[str], files: Iterable[str]) -> list[str]:
    """Return the test files that are named after a module: `test_x.py`, `test_x_probe.py`.

    Args:
        module: last part of its name.
        others: last parts of the names of the modules beside it; what is named after a longer one is theirs.
        files: paths.
    """
    longer = [other for other in others if other.startswith(f"{module}_")]

    def fits(stem: str, name: str) -> bool:
        return stem == f"test_{name}" or stem.startswith(f"test_{name}_")

    tests = [path for path in files if path.startswith("tests/") and path.endswith(".py")]
    stems = {path: PurePosixPath(path).stem for path in tests}
    return [
        path for path, stem in stems.items() if fits(stem, module) and not any(fits(stem, other) for other in longer)
    ]
