"""The formatters that a target repository asks contributors to run, and whether a proposed diff passes them.

Read on 2026-11-21 from the newest stored snapshot of each repository:

    NVIDIA/Megatron-LM        d98e8a64  tools/autoformat.sh, linting group of pyproject.toml, pull request template
    linkedin/Liger-Kernel     ead96b61  checkstyle of Makefile, extra dev of setup.py, pull request template
    tile-ai/tilelang          a35008a4  .pre-commit-config.yaml
    NVIDIA/TransformerEngine  d0067d0d  .pre-commit-config.yaml
    state-spaces/mamba        e9594ce1  nothing: no configuration of a formatter

What a formatter is told beside its command it reads from the target's own configuration, in the tree. Only two of the
five have a configuration of pre-commit, which would fetch its hooks while a pack is checked.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from megacpp_overlays.repro import git
from megacpp_overlays.upkeep.filing.checks import Check, CheckOutcome, read_text

NAME = "formatter"

_PYTHON = r".*\.pyi?"
_CONFIGURATION = (
    "pyproject.toml",
    "setup.cfg",
    "tox.ini",
    ".pylintrc",
    "pylintrc",
    "ruff.toml",
    ".ruff.toml",
    ".isort.cfg",
    ".clang-format",
    ".gitignore",
)
_SHOWN = 12
"""Lines of what a formatter prints that are shown."""
_TIMEOUT = 300.0
"""Seconds for one formatter."""


@dataclass(frozen=True, slots=True)
class Formatter:
    """One command that must end with 0 on every file that a diff touches."""

    requirement: str
    """Distribution and the versions that the target runs; another one may want another layout."""
    command: tuple[str, ...]
    """The files are added at its end."""
    files: str = _PYTHON
    """Expression that the path of a file in the repository must fit."""


_MEGATRON = r"(?:megatron/core|tests)/.*\.py"
_ENGINE = r"transformer_engine.*\.(?:c|cc|cxx|cpp|cu|cuh|h|hpp)"
_NATIVE = r"(?!3rdparty/|build/).*\.(?:c|cc|cxx|cpp|cu|cuh|h|hpp)"

FORMATTERS: Mapping[str, tuple[Formatter, ...]] = {
    "NVIDIA/Megatron-LM": (
        Formatter(
            "black==26.3.0",
            ("black", "--check", "--diff", "--skip-magic-trailing-comma", "--skip-string-normalization"),
            _MEGATRON,
        ),
        Formatter("isort==5.13.2", ("isort", "--check", "--diff"), _MEGATRON),
        Formatter("pylint==3.2.6", ("pylint",), _MEGATRON),
        Formatter("ruff~=0.9.0", ("ruff", "check", "--no-fix"), _MEGATRON),
    ),
    "linkedin/Liger-Kernel": (
        Formatter("ruff>=0.12.0,<0.16.0", ("ruff", "check", "--output-format=concise")),
        Formatter("ruff>=0.12.0,<0.16.0", ("ruff", "format", "--check", "--diff")),
    ),
    "tile-ai/tilelang": (
        Formatter("ruff==0.16.1", ("ruff", "check", "--output-format=concise"), rf"(?!3rdparty/|build/){_PYTHON}"),
        Formatter("ruff==0.16.1", ("ruff", "format", "--check", "--diff"), rf"(?!3rdparty/|build/){_PYTHON}"),
        Formatter("clang-format==22.1.8", ("clang-format", "--dry-run", "--Werror", "-style=file"), _NATIVE),
    ),
    "NVIDIA/TransformerEngine": (
        Formatter(
            "black==24.4.2",
            (
                "black",
                "--check",
                "--diff",
                "--line-length=100",
                "--preview",
                "--enable-unstable-feature=string_processing",
            ),
        ),
        Formatter("clang-format==18.1.6", ("clang-format", "--dry-run", "--Werror", "-style=file"), _ENGINE),
    ),
    "state-spaces/mamba": (),
}


def check(
    diffs: Sequence[Path],
    repository: str | None,
    tree: Path | None,
    formatters: Mapping[str, tuple[Formatter, ...]] = FORMATTERS,
) -> Check:
    """Apply the diffs of a pack to a copy of the files that they touch, and run the target's formatters on those.

    Args:
        diffs: every proposed diff, in the order in which they apply.
        repository: the target, as owner/name.
        tree: a checkout of the target, or a folder in one; it is left as it is.
        formatters: by target.
    """
    if not diffs:
        return _check(CheckOutcome.NOT_APPLICABLE, "no diff is attached")
    if repository is None or repository not in formatters:
        return _check(CheckOutcome.FAILED, f"what {repository} asks for is not known: add it to {__name__}")
    if not formatters[repository]:
        return _check(CheckOutcome.NOT_APPLICABLE, f"{repository} asks for none")
    if tree is None:
        return _check(CheckOutcome.FAILED, f"--tree PATH, a checkout of {repository}, is needed to apply the diff to")
    with tempfile.TemporaryDirectory(prefix="formatter-") as folder:
        copy = Path(folder)
        touched, wrong = _apply(diffs, _root(tree), copy)
        if wrong:
            return _check(CheckOutcome.FAILED, "the diff does not apply to the tree", wrong)
        return _run(formatters[repository], copy, touched)


def _check(outcome: CheckOutcome, reason: str, details: Sequence[str] = ()) -> Check:
    return Check(name=NAME, outcome=outcome, reason=reason, details=tuple(details))


def _root(tree: Path) -> Path:
    """Return the checkout that a folder belongs to; `--tree` of a reproducer may name the sources in it."""
    return next((folder for folder in (tree, *tree.resolve().parents) if (folder / ".git").exists()), tree)


def _apply(diffs: Sequence[Path], root: Path, copy: Path) -> tuple[list[str], list[str]]:
    """Apply diffs to a copy of what they touch; return the files that are there afterwards, and what went wrong."""
    paths = sorted({path for diff in diffs for path in _paths(read_text(diff))})
    for path in (*paths, *_CONFIGURATION):
        source = root / path
        if source.is_file() and source.resolve().is_relative_to(root.resolve()):
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy / path)
    for diff in diffs:
        # A repository around the temporary folder must not make git leave out what is not below its root.
        outside = {"GIT_CEILING_DIRECTORIES": str(copy.resolve().parent)}
        try:
            git.run(copy, "apply", str(diff.resolve()), variables=outside)
        except git.GitError as error:
            return [], [f"{diff.name}: {line}" for line in error.output[:_SHOWN] or [str(error)]]
    return [path for path in paths if (copy / path).is_file()], []


def _paths(diff: str) -> Iterator[str]:
    for found in re.finditer(r"^(?:(?:---|\+\+\+) [ab]/|rename (?:from|to) )([^\t\n]+)", diff, re.MULTILINE):
        if not Path(found[1]).is_absolute() and ".." not in Path(found[1]).parts:
            yield found[1]


def _run(formatters: Sequence[Formatter], copy: Path, touched: Sequence[str]) -> Check:
    passed: dict[str, None] = {}
    for formatter in formatters:
        files = [path for path in touched if re.fullmatch(formatter.files, path)]
        if not files:
            continue
        wanted, name = Requirement(formatter.requirement), formatter.command[0]
        program = _program(name)
        install = f"pip install '{wanted}'"
        if program is None:
            return _check(CheckOutcome.FAILED, f"{name} is not installed: {install}")
        said = re.search(r"\d+(?:\.\d+)+", _call([program, "--version"], copy).stdout)
        version = said[0] if said else "an unknown version"
        if said is None or not wanted.specifier.contains(version):
            return _check(CheckOutcome.FAILED, f"{name} is {version}, and the target runs {wanted}: {install}")
        done = _call([program, *formatter.command[1:], *files], copy)
        if done.returncode:
            lines = [line for line in done.stdout.splitlines() if line.strip()][:_SHOWN]
            return _check(CheckOutcome.FAILED, f"{' '.join(formatter.command)} ended with {done.returncode}", lines)
        passed[f"{name} {version}"] = None
    if not passed:
        return _check(CheckOutcome.NOT_APPLICABLE, f"the target formats none of {', '.join(touched)}")
    return _check(CheckOutcome.PASSED, f"{', '.join(passed)} on {', '.join(touched)}")


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))


def _call(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - the table above, and files below a folder of ours
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        timeout=_TIMEOUT,
    )
