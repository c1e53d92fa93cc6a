"""The page that teaches how to write an overlay, done word for word: its files are written and its commands run."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from places import HANG_S, ROOT

PAGE = ROOT / "docs" / "write-an-overlay.md"
TOOLS = ("pip", "setuptools", "wrapt", "importlib-metadata", "packaging")

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# file: (\S+)\n")


class Step(NamedTuple):
    """A file to write, or a command to run with its output."""

    file: str = ""
    text: str = ""
    command: str = ""


def steps(page: str) -> list[Step]:
    """Return the steps of the page, in its order."""
    found: list[Step] = []
    for language, body in _BLOCK.findall(page):
        if named := _FILE.match(body):
            found.append(Step(file=named[1], text=body[named.end() :]))
        elif language == "console":
            found += _commands(body)
    return found


def _commands(body: str) -> Iterator[Step]:
    for block in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        command, _, output = block.partition("\n")
        yield Step(command=command, text=output)


def as_pattern(output: str) -> str:
    """Return the regular expression of an output, in which `...` matches anything on its line."""
    return ".*".join(map(re.escape, output.split("...")))


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """An empty folder, with an environment that has this package, its dependencies and pip, and nothing else."""
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    waiting, seen = [Requirement(name) for name in TOOLS], set[str]()
    while waiting:
        wanted = waiting.pop()
        if wanted.name in seen or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        seen.add(wanted.name)
        distribution = importlib.metadata.distribution(wanted.name)
        waiting += [Requirement(line) for line in distribution.requires or ()]
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in {"..", "__pycache__"}}:
            (libraries / top).symlink_to(Path(str(distribution.locate_file(top))))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site_packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site_packages / "libraries.pth").write_text(f"{libraries}\n{ROOT}\n")
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def run(command: str, folder: Path) -> str:
    """Return the standard output of a command line of the page, run without a network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "MEGACPP_"))}
    path = os.pathsep.join((str(folder.parent / "venv" / "bin"), os.environ["PATH"]))
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_CACHE_DIR": "0"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**kept, **offline, "PATH": path},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_an_overlay_is_written_with_nothing_but_the_page_at_hand(scratch: Path) -> None:
    decisions = []
    for step in steps(PAGE.read_text()):
        if step.file:
            path = scratch / step.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(step.text)
        else:
            printed = run(step.command, scratch)
            assert re.fullmatch(as_pattern(step.text), printed), f"{step.command}\n{printed}"
            decisions += re.findall(r"^([a-z]+) \|", printed, re.MULTILINE)
    assert decisions == ["active", "disabled", "retired", "conflict"]
