"""Throw-away environments in which `megacpp-overlays enable` is tried, with real processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import made_environments
from places import HANG_S, ROOT

from megacpp_overlays.variables import is_ours

IS_ARMED = "import sys; print('megacpp_overlays' in sys.modules)"


@dataclass(frozen=True)
class TriedEnvironment:
    """An environment with this package and without an upstream."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        return next((self.folder / "lib").glob("python*/site-packages"))

    @property
    def file(self) -> Path:
        return self.site / "megacpp_overlays.pth"

    def start(
        self, *words: str, options: Sequence[str] = (), user: int | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Start its Python; no variable of this package or of Python reaches it but those that are given."""
        kept = {name: value for name, value in os.environ.items() if not (is_ours(name) or name.startswith("PYTHON"))}
        command = [str(self.python), *options, *words]
        return subprocess.run(
            command, env={**kept, **variables}, capture_output=True, text=True, timeout=HANG_S, check=False, user=user
        )

    def command(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of this package in it."""
        return self.start("-m", "megacpp_overlays", *words, **variables)

    def is_armed(self, *options: str, **variables: str) -> bool:
        """Return whether a Python of it starts armed."""
        done = self.start("-c", IS_ARMED, options=options, **variables)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout == "True\n"


def make(folder: Path, python: str = sys.executable) -> TriedEnvironment:
    """Make an environment of a Python, with this checkout and its dependencies on its path."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=HANG_S)
    return _filled(TriedEnvironment(folder))


def _filled(made: TriedEnvironment) -> TriedEnvironment:
    for name in made_environments.with_what_they_need(made_environments.NEEDED):
        made_environments.link(made.site, name)
    (made.site / "checkout.pth").write_text(f"{ROOT}\n")
    return made


def make_system_python(folder: Path) -> TriedEnvironment:
    """Make a Python that is in no virtual environment, as that of an image: the library of this one, and site-packages of its own."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    library = Path(os.__file__).parent
    (folder / "bin").mkdir(parents=True)
    shutil.copy(Path(sys.base_prefix, "bin", version).resolve(), folder / "bin" / "python")
    shutil.copy(folder / "bin" / "python", folder / "bin" / version)
    own = folder / "lib" / version
    (own / "site-packages").mkdir(parents=True)
    for each in library.iterdir():
        if each.name != "site-packages":
            (own / each.name).symlink_to(each)
    return _filled(TriedEnvironment(folder))


def other_copy(folder: Path) -> Path:
    """Make a second copy of this package; return the folder for PYTHONPATH."""
    package = folder / "megacpp_overlays"
    package.mkdir(parents=True)
    for each in (ROOT / "megacpp_overlays").iterdir():
        if each.name == "__init__.py":
            shutil.copy(each, package)
        elif each.name != "__pycache__":
            (package / each.name).symlink_to(each)
    return folder
