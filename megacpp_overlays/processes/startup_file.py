"""The start-up file: a `.pth` in the site-packages of an environment that arms every Python of it.

`site` executes it in each process before the first line, under -I and -E, too, and whatever PYTHONPATH is. Only -S leaves it
out. `site` prints the exception of a `.pth` and goes on, so the code that the file executes ends the process itself.
"""

from __future__ import annotations

import os
import re
import site
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megacpp_overlays import files
from megacpp_overlays.errors import StartupFileError
from megacpp_overlays.variables import is_ours

NAME = "megacpp_overlays.pth"
PACKAGE = Path(__file__).absolute().parents[1]
"""The folder of this copy of the package."""

_CODE = """\
import importlib.machinery, os
file, startup = {file}, {startup}
try:
    code = importlib.machinery.SourceFileLoader('megacpp_overlays_enabled', startup).get_code('megacpp_overlays_enabled')
except OSError as error:
    text = 'megacpp_overlays: ' + str(error) + '\\nmegacpp_overlays: ' + file + ' arms every Python of this environment with that' \\
        ' file, so this one ends here. Install megacpp_overlays again, or delete ' + file + '\\n'
    os.write(2, text.encode(errors='backslashreplace'))
    os._exit(1)
exec(code, {{'__name__': 'megacpp_overlays_enabled', '__file__': startup, 'STARTUP_FILE': file}})
"""
_HEAD = "# Written by `megacpp-overlays enable`: arms every Python of this environment. `megacpp-overlays disable` removes it.\n"
_ASK = "import sys; m = sys.modules.get('megacpp_overlays'); print(getattr(m, '_startup_file', ''), getattr(m, '__file__', ''), sep='\\n')"


class StartupFile(NamedTuple):
    """A start-up file that is there."""

    path: Path
    text: str

    @property
    def is_ours(self) -> bool:
        """Whether the text equals the one that `enable` of this copy writes."""
        return self.text == written(self.path)

    @property
    def package(self) -> str:
        """The folder of the package that the file arms with, or "no package" where it names none."""
        leads_to = re.search(r"'([^']*)/processes/startup/", self.text)
        return leads_to.group(1) if leads_to else "no package"


def written(path: Path) -> str:
    """Return the text of a start-up file. It is ASCII, since older Pythons read it in the encoding of the locale."""
    startup = PACKAGE / "processes" / "startup" / "sitecustomize.py"
    code = _CODE.format(file=ascii(str(path)), startup=ascii(str(startup)))
    return f"{_HEAD}import sys; exec({code!r})\n"


def folders() -> list[Path]:
    """Return the site-packages whose `.pth` files each Python of this environment executes, without the user's own."""
    return [Path(each) for each in site.getsitepackages() if os.path.isdir(each)]


def found() -> list[StartupFile]:
    """Return the start-up files of this environment; the first that is executed arms."""
    paths = [folder / NAME for folder in folders()]
    return [StartupFile(path, files.read_text(path)) for path in paths if path.exists()]


def is_environment() -> bool:
    """Return whether this Python is one of a virtual or conda environment, and not one that other programs share."""
    return sys.prefix != sys.base_prefix or (Path(sys.prefix) / "conda-meta").is_dir()


def enable() -> StartupFile:
    """Write the start-up file, start a Python, and take the file back if that one is not armed.

    Raises:
        StartupFileError: there is no folder for it, it cannot be written, or a Python with it does not start armed.
    """
    path = _folder() / NAME
    try:
        before = path.read_bytes() if path.exists() else None
        files.write_text(path, written(path))
        path.chmod(0o644)  # a `.pth` that a user of the image cannot read is left out by `site` without a word
    except OSError as error:
        raise StartupFileError(
            f"{path}: {error.strerror}; write it while the image is built, or print variables that arm with `megacpp-overlays env`"
        ) from error
    if why := not_armed(path):
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)
        raise StartupFileError(f"a Python of this environment does not start with {path}, so it was taken back: {why}")
    return StartupFile(path, written(path))


def _folder() -> Path:
    candidates = folders()
    usual = [Path(sysconfig.get_path("purelib"))]
    for each in (*(each for each in candidates if each in PACKAGE.parents), *usual, *candidates):
        if each in candidates:
            return each
    raise StartupFileError(f"{sys.executable} has no site-packages folder: it has {site.getsitepackages()}")


def disable() -> list[Path]:
    """Remove every start-up file of this environment; return where they were.

    Raises:
        OSError: one cannot be removed.
    """
    paths = [each.path for each in found()]
    for path in paths:
        path.unlink()
    return paths


def not_armed(path: Path, options: Sequence[str] = ("-I",)) -> str:
    """Start a Python of this environment, and return why a start-up file does not arm it; empty where it does.

    Args:
        path: of the start-up file.
        options: of that Python.
    """
    env = {name: value for name, value in os.environ.items() if not is_ours(name)}
    done = subprocess.run([sys.executable, *options, "-c", _ASK], env=env, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        return " ".join(done.stderr.split()) or f"it ends with {done.returncode}"
    by, _, package = done.stdout.partition("\n")
    if by != str(path):
        return f"it was armed by {by}" if by else "it is not armed"
    at = Path(package.strip()).parent
    return "" if at == PACKAGE else f"it was armed with the package in {at}"
