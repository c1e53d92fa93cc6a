"""Small real wheels for the tests of drift."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from places import measuring

from megacpp_overlays.upkeep.drift import installations
from megacpp_overlays.upkeep.drift.installations import Installation


def make_wheel(folder: Path, name: str, version: str, files: Mapping[str, str]) -> Path:
    """Write a wheel with a RECORD.

    Args:
        folder: where it goes.
        name: of the distribution, with underscores.
        version: of it.
        files: content by path inside the wheel.
    """
    info = f"{name}-{version}.dist-info"
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [f"{file},sha256={digest(text)},{len(text.encode())}" for file, text in content.items()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in content.items():
            archive.writestr(file, text)
        archive.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,", ""]))
    return path


def digest(content: str | bytes, algorithm: str = "sha256") -> str:
    """Return a hash in the form of a RECORD."""
    raw = content.encode() if isinstance(content, str) else content
    return base64.urlsafe_b64encode(hashlib.new(algorithm, raw).digest()).rstrip(b"=").decode()


def install(target: Path, *packages: Path | str, find_links: Path | None = None) -> None:
    """Install with pip into a folder; pip notes the origin of a path, and not of a name that it finds by `find_links`."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    words = [*command, "--disable-pip-version-check", "--target", str(target), *map(str, packages)]
    words += ["--find-links", str(find_links)] if find_links else []
    env = {name: value for name, value in without_pythonpath().items() if name not in measuring()}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr


def without_pythonpath() -> dict[str, str]:
    """Return the environment variables without the PYTHONPATH of the test run."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def installed_in(target: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Installation]:
    """Put a folder first on the path, and return the distributions that are installed in it."""
    monkeypatch.syspath_prepend(target)
    return installations.find_all([str(target)])
