"""Kept passes: which files of tests passed before, each with a key of all that its tests are made of.

A test of an overlay or of a kernel runs it on real releases, on ranks or in Triton's interpreter, and its result depends on
nothing but files of this checkout and on locked releases. So a file of tests that passed is kept in `tests/answers/passed.json`
under a key of

    code      the file, `conftest.py`, and all modules of this checkout that they import, wherever they are imported
    packs     every file of the packs of the overlays among these
    data      stand-ins, settings of pytest, locks, and every other file of the checkout that its tests opened when it was kept
    host      Python, the machine's architecture, and whether it has a GPU and Transformer Engine

`pytest --kept` leaves out the files whose key is the kept one; `pytest --keep` keeps the files that pass. `make test` does the first, and
`make passes` both, so that the next commit runs only the tests of code that it changes. `make test-all` runs all.

Other overlays than those that a file imports are no part of its key, although they are armed in its processes. The effects of overlays
on each other are tested on every commit with all of them on: `tests/proof/test_differential.py` and `tests/project/test_lanes.py`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import kept_answers
from places import ROOT

from megacpp_overlays.model import variable_for

ROOMS = ("tests/kernels", "tests/overlays")
"""Folders whose files can be kept."""
OVERLAYS = "megacpp_overlays/overlays/"
OWN = ("megacpp_overlays/kernels/", OVERLAYS)
"""The code under test in these files. A file that imports nothing of it is about all overlays, and runs each time."""
ALWAYS = ("tests/conftest.py", "tests/support/warm_server.py", "megacpp_overlays/__init__.py")
"""Files that every file of tests runs, with all that they import."""
COMMON = (
    "pyproject.toml",
    "locks/*.txt",
    "megacpp_overlays/source/recorded/*.json",
    "megacpp_overlays/loader/audit.schema.json",
    "megacpp_overlays/loader/retired.json",
    "megacpp_overlays/source/published.json",
    "tests/stand_ins/**/*",
    "tests/empty_modules/**/*",
)
"""Patterns of files that every key has."""
DERIVED = frozenset({"known.json", "matrix.json", "passed.json"})
"""Names of files that are made of probes and releases; `make in-step` and `tests/loader/test_known.py` ask whether they still are."""
_OUTSIDE = (".cache/", ".envs/", ".git/", ".hypothesis/", ".venv/")
_IN_TEXT = re.compile(r"(?:from|import)\s+([\w.]+)(?:\s+import\s+\(?([\w, ]+))?")
"""Import statements, in code that a test hands to another process."""
_NAME = re.compile(r"[\w-]+")


@dataclass(frozen=True)
class Pass:
    """A file whose tests all passed."""

    key: str
    """64 hexadecimal digits of SHA-256."""
    tests: int
    opened: tuple[str, ...] = ()
    """Files of the checkout that its tests opened and that its key would not have otherwise, relative to the checkout."""


def passed() -> Path:
    """Return the file of kept passes."""
    return ROOT / "tests" / "answers" / "passed.json"


def kept() -> dict[str, Pass]:
    """Return the kept passes, by the path of the file."""
    if not passed().is_file():
        return {}
    found = json.loads(passed().read_text())
    return {path: Pass(each["key"], each["tests"], tuple(each.get("opened", ()))) for path, each in found.items()}


def keep(passes: Mapping[str, Pass]) -> None:
    """Write passes over those of the same files; those of files that are gone are dropped."""
    every = {path: each for path, each in sorted({**kept(), **passes}.items()) if (ROOT / path).is_file()}
    data = {
        path: {"key": each.key, "tests": each.tests, **({"opened": list(each.opened)} if each.opened else {})}
        for path, each in every.items()
    }
    passed().parent.mkdir(exist_ok=True)
    passed().write_text(json.dumps(data, indent=1) + "\n")


def unchanged(path: str) -> Pass | None:
    """Return the pass of a file of tests where nothing that it is made of has changed since."""
    found = kept().get(path)
    return found if found is not None and key_of(path, found.opened) == found.key else None


def can_be_kept(path: str) -> bool:
    """Return whether a file of tests is about overlays or kernels that it names."""
    return path.startswith(ROOMS) and any(each.startswith(OWN) and not _is_package(each) for each in code_of(path))


def key_of(path: str, opened: Iterable[str] = ()) -> str:
    """Return the key of a file of tests.

    Args:
        path: of the file, relative to the checkout.
        opened: other files that its tests open.
    """
    files = sorted({*files_of(path), *opened})
    hashes = [(name, _digest(ROOT / name)) for name in files]
    host = [platform.python_version(), platform.machine(), *_skipped()]
    return hashlib.sha256(json.dumps([hashes, host]).encode()).hexdigest()


def _skipped() -> tuple[bool, bool]:
    """Return whether tests are skipped here that need a GPU, and Transformer Engine with its PyTorch part."""
    return shutil.which("nvidia-smi") is None, not (ROOT / ".envs/te/.ready").is_file()


def not_in_key(path: str, opened: Iterable[str]) -> tuple[str, ...]:
    """Return which of the files that tests opened are of this checkout and not in the key of their file, in order.

    Args:
        path: of the file of tests, relative to the checkout.
        opened: absolute paths.
    """
    names = {each.removeprefix(f"{ROOT}/") for each in opened if each.startswith(f"{ROOT}/")}
    data = {each for each in names if not each.startswith(_OUTSIDE) and not each.endswith((".py", ".pyc"))}
    inside = {str((ROOT / each).resolve().relative_to(ROOT)) for each in files_of(path)}
    real = {str((ROOT / each).resolve().relative_to(ROOT)) for each in data if (ROOT / each).is_file()}
    return tuple(sorted(each for each in real - inside if Path(each).name not in DERIVED))


def files_of(path: str) -> frozenset[str]:
    """Return all files that the key of a file of tests is made of, relative to the checkout."""
    return code_of(path) | _packs(code_of(path)) | _common()


@functools.cache
def code_of(path: str) -> frozenset[str]:
    """Return a file of tests and all modules of this checkout that it and its processes import."""
    found: set[Path] = set()
    waiting = {ROOT / each for each in (path, *ALWAYS)}
    while waiting:
        found |= kept_answers.reached(*waiting)
        waiting = {file for each in found for file in _started(each) | _asked_for(each)} - found
    return frozenset(str(each.relative_to(ROOT)) for each in found)


@functools.cache
def _started(path: Path) -> frozenset[Path]:
    """Return the modules of this checkout that a file imports in code that it hands to another process."""
    names = set()
    for text in kept_answers.texts(path):
        for module, parts in _IN_TEXT.findall(text):
            names |= {module, *(f"{module}.{each.strip()}" for each in parts.split(","))}
    return frozenset(file for name in names for file in kept_answers.files(name))


@functools.cache
def _asked_for(path: Path) -> frozenset[Path]:
    """Return the overlays that a file of tests has the name of, or names in a string by their id or by their variable."""
    if not path.is_relative_to(ROOT / "tests"):
        return frozenset()
    words = {path.stem.removeprefix("test_").replace("_", "-")}
    words |= {word for text in kept_answers.texts(path) for word in _NAME.findall(text)}
    return frozenset(file for each, file in _overlays().items() if each in words or variable_for(each) in words)


@functools.cache
def _overlays() -> Mapping[str, Path]:
    """Return the modules of overlays, by the id of the overlay."""
    return {each.stem.replace("_", "-"): each for each in (ROOT / OVERLAYS).glob("[!_]*.py")}


def _packs(code: frozenset[str]) -> frozenset[str]:
    """Return the files of all packs that are about overlays of this code."""
    ids = {each for each, file in _overlays().items() if str(file.relative_to(ROOT)) in code}
    folders = {each.parent for each in ROOT.glob("packs/*/reproduce.py") if _quoted(each) & ids}
    return frozenset(_files(f"{each.relative_to(ROOT)}/**/*" for each in folders))


@functools.cache
def _quoted(path: Path) -> frozenset[str]:
    return frozenset(kept_answers.texts(path))


@functools.cache
def _common() -> frozenset[str]:
    return frozenset(_files(COMMON))


@functools.cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "none"


def _files(patterns: Iterable[str]) -> Iterator[str]:
    """Yield the files of the checkout that match patterns."""
    for path in (each for pattern in patterns for each in ROOT.glob(pattern)):
        if path.is_file() and "__pycache__" not in path.parts:
            yield str(path.relative_to(ROOT))


def _is_package(name: str) -> bool:
    return name.endswith("__init__.py") or name == "megacpp_overlays/kernels/measured.py"
