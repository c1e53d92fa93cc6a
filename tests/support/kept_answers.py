"""Kept answers: the JSON that a script printed before, keyed by all that it was made of.

Kernels in Triton's interpreter and programs compiled for devices that are not there take minutes, and their answers depend on
nothing but code. So an answer is kept under a key of

    code      the script, and all modules of this checkout that it imports, wherever they are imported, without comments and docstrings
    request   the words and the variables of the process
    versions  Python, the machine's architecture, and every distribution that this code imports

A process whose key is kept does not run. Answers of the last commit are in `tests/answers`, written by `make answers`; those that
were derived since are in `.cache/answers`. With `KEPT_ANSWERS=no` every process runs, as in `make test-all`.

A process that loaded a module of this checkout which the key does not cover is an error: see `observed_imports.py`. The package
is switched off in these processes, so the modules that `import megacpp_overlays` alone loads are no part of a key.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import warm_python
from places import HANG_S, ROOT, SUPPORT

from megacpp_overlays.source import fingerprint
from megacpp_overlays.source.definitions import imported_names

COMMITTED = ROOT / "tests" / "answers"
DERIVED = ROOT / ".cache" / "answers"
KEEP = "KEPT_ANSWERS"
"""The variable that says `no` where every process has to run, or names a folder where the names of used answers are noted."""
PACKAGE = "megacpp_overlays"
ALWAYS = ("torch", "triton", "numpy")
"""Distributions that compute, whether the code imports them or another distribution does."""
PREFIXES = ("TRITON_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "CUDA_", "MEGACPP_")
"""Beginnings of variables that a process has none of but those that it is given."""


def answer(script: str, *words: str, **variables: str) -> dict[str, Any]:
    """Return the JSON objects that a script of this folder prints, as one, with Triton imported and this package off.

    The script does not run where its answer is kept.

    Args:
        script: its file name.
        words: its arguments.
        variables: of its environment, see `environment`.
    """
    path, given = SUPPORT / script, {"MEGACPP_OVERLAYS": "off", **variables}
    key = key_of(path, words, given)
    found: dict[str, Any] | None = look_up(key)
    if found is None:
        found = _observed(path, words, given)
        keep(key, path.stem, found)
    return found


def _observed(script: Path, words: Sequence[str], variables: Mapping[str, str]) -> dict[str, Any]:
    """Run a script to its end. It may load no module of this checkout that the key of its answer does not cover."""
    path = os.pathsep.join([str(ROOT), str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    env = {**environment(variables), "PYTHONPATH": path}
    with tempfile.NamedTemporaryFile("r") as loaded:
        command = ["-W", "ignore", SUPPORT / "observed_imports.py", loaded.name, script, *words]
        done = warm_python.run(command, env, after=warm_python.TRITON, timeout=HANG_S)
        assert done.returncode == 0, done.stderr[-4000:]
        assert (missing := uncovered(loaded.read().splitlines(), script)) == [], missing
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line)
    return found


def look_up(key: str) -> Any:
    """Return the answer that is kept under a key, or None."""
    if os.environ.get(KEEP) == "no":
        return None
    for path in (DERIVED / f"{key}.json", *COMMITTED.glob(f"*.{key}.json")):
        if path.is_file():
            _note(key)
            return json.loads(path.read_text())["answer"]
    return None


def keep(key: str, name: str, answer: Any) -> None:
    """Keep an answer until a file of the checkout takes its place.

    Args:
        key: of `key_of`.
        name: of the script, for people.
        answer: JSON.
    """
    DERIVED.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=DERIVED)
    with open(descriptor, "w") as file:
        json.dump({"script": name, "answer": answer}, file)
        file.write("\n")
    Path(draft).chmod(0o644)
    os.rename(draft, DERIVED / f"{key}.json")  # whole, whichever worker is first
    _note(key)


def _note(key: str) -> None:
    if (folder := os.environ.get(KEEP, "no")) != "no":
        (Path(folder) / key).touch()


def key_of(script: Path, words: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return 20 hexadecimal digits for a process and all that its answer depends on.

    Args:
        script: the script that the process runs.
        words: its arguments.
        variables: of its environment, see `environment`.
    """
    request = [str(script.relative_to(ROOT)), list(words), sorted(variables.items())]
    return hashlib.sha256(json.dumps([request, *_made_of(script)]).encode()).hexdigest()[:20]


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process: this one's, where variables that may change an answer are replaced by the given ones."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith(PREFIXES)}, **variables}


@functools.cache
def _made_of(script: Path) -> tuple[Any, ...]:
    code = [(str(path.relative_to(ROOT)), meaning(path)) for path in closure(script)]
    return code, sorted(_versions(closure(script))), platform.python_version(), platform.machine()


def _versions(code: Iterable[Path]) -> Iterator[str]:
    """Yield the distributions that files import, with their versions."""
    distributions = importlib.metadata.packages_distributions()
    imported = {name.partition(".")[0] for path in code for name in _imported(path)} | {*ALWAYS}
    for name in {each for top in imported - {PACKAGE} for each in distributions.get(top, ())}:
        yield f"{name} {importlib.metadata.version(name)}"


@functools.cache
def closure(script: Path) -> tuple[Path, ...]:
    """Return a script and all modules of this checkout that it imports, in order.

    Scripts of this folder that it names in a text, such as one that it starts, are among them.
    """
    return tuple(sorted(reached(script, SUPPORT / "warm_server.py")))


def reached(*starts: Path) -> set[Path]:
    """Return files and all modules of this checkout that they import, and the scripts of this folder that they name."""
    found: set[Path] = set()
    waiting = [*starts]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += [each for name in _imported(path) for each in files(name)]
            waiting += [SUPPORT / name for name in _named(path)]
    return found


@functools.cache
def _imported(path: Path) -> frozenset[str]:
    """Return all names that a file imports, and those of modules in its strings, which may be imported by name."""
    return frozenset(imported_names(_syntax(path))) | {text for text in texts(path) if text.startswith(f"{PACKAGE}.")}


@functools.cache
def _named(path: Path) -> frozenset[str]:
    """Return the scripts of this folder that a file names in a string."""
    return frozenset(
        each for each in texts(path) if each.endswith(".py") and "/" not in each and (SUPPORT / each).is_file()
    )


@functools.cache
def texts(path: Path) -> tuple[str, ...]:
    """Return the strings of a file, in order."""
    walked = ast.walk(_syntax(path))
    return tuple(each.value for each in walked if isinstance(each, ast.Constant) and isinstance(each.value, str))


@functools.cache
def meaning(path: Path) -> str:
    """Return the digest of a Python file without comments and docstrings, those of attributes included."""
    return fingerprint.digest(_WithoutDocstrings().visit(ast.parse(path.read_bytes())))


class _WithoutDocstrings(ast.NodeTransformer):
    """Removal of all statements that are nothing but text."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Return None for a text, which removes it."""
        return None if fingerprint.is_docstring(node) else node


@functools.cache
def _syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


@functools.cache
def files(name: str) -> tuple[Path, ...]:
    """Return the file of a module of this checkout, and those of the packages that it is in; the package itself is left out."""
    return tuple(_files(name))


def _files(name: str) -> Iterator[Path]:
    first, *rest = name.split(".")
    folder = ROOT / first if first == PACKAGE else SUPPORT / first
    if not rest and (file := folder.with_suffix(".py")).is_file():
        yield file
    for number in range(1 if first == PACKAGE else 0, len(rest) + 1):
        module = folder.joinpath(*rest[:number])
        yield from (each for each in (module.with_suffix(".py"), module / "__init__.py") if each.is_file())


def uncovered(loaded: Iterable[str], script: Path) -> list[str]:
    """Return which files of this checkout that a process loaded are not covered by the key of its script."""
    covered = {*closure(script), *reached(ROOT / PACKAGE / "__init__.py")}
    return sorted({*loaded} - {str(path) for path in covered})
