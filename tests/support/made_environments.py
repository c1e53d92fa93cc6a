"""A made-up upstream, the plugin that repairs it and the pack that reproduces it: in an environment of their own, or here."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import textwrap
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from made_up import Upstream, install_plugin
from packaging.requirements import Requirement
from places import ROOT, SUPPORT

from megacpp_overlays.upkeep import locks
from megacpp_overlays.upkeep.environments import Environment

NEEDED = ("wrapt", "packaging", "importlib-metadata")
"""The run-time dependencies of this package."""
PLUGIN = """
from pathlib import Path
from made_up import Upstream
OVERLAY = Upstream("made_target", Path(__file__).parent).overlay()
"""
REPRODUCER = """
import os, signal, subprocess, sys, time
from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

def double():
    from made_target import layers
    if not hasattr(layers, "double"):
        raise TargetAbsent("no double")
    return layers.double(1)

def measure():
{body}

CASES = (
    Case(name="double", overlay="double-fix", device={device!r}, versions=("packaging",), run=measure{more}),
)
"""
HONEST = 'value = double()\nreturn Behaviour(broken=value != 2, seen=f"double(1) = {value}")'


def make(folder: Path, text: str, version: str, *, needed: tuple[str, ...] = NEEDED) -> Environment:
    """Make an environment with one release of the made-up upstream, and a lock that it holds.

    Args:
        folder: where; `bin/python` will be in it, and `lock.txt`.
        text: the module `made_target.layers` of the release.
        version: of the release.
        needed: other packages to install.
    """
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    site = next((folder / "lib").glob("python*/site-packages"))
    pins = {name: link(site, name) for name in with_what_they_need(needed)} | {"made-target": version}
    (site / "made_up.py").symlink_to(SUPPORT / "made_up.py")
    (site / "made_up_plugin.py").write_text(PLUGIN)
    points = "[megacpp_overlays.overlays]\ndouble = made_up_plugin:OVERLAY\n"
    _describe(site, "made-up-plugin", "1.0")
    (site / "made_up_plugin-1.0.dist-info" / "entry_points.txt").write_text(points)
    (site / "made_target").mkdir()
    (site / "made_target" / "__init__.py").touch()
    (site / "made_target" / "layers.py").write_text(text)
    _describe(site, "made-target", version)
    lock = folder / "lock.txt"
    python = "{}.{}".format(*sys.version_info)
    lines = [f"# lane: {folder.name}", f"# python: {python}"]
    lines += [f"{name}=={pinned} --hash=sha256:{'0' * 64}" for name, pinned in pins.items()]
    lock.write_text("\n".join([*lines, ""]))
    return Environment(locks.read(lock), folder / "bin" / "python")


def install_here(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Upstream:
    """Let this process and its children find a release of the made-up upstream, and the plugin; return the upstream.

    Args:
        folder: the folder that both are written into.
        monkeypatch: takes the paths back.
        text: the module `made_target.layers` of the release.
    """
    (folder / "made_up_plugin.py").write_text(PLUGIN)
    install_plugin(folder, "made_up_plugin:OVERLAY")
    path = [str(folder), str(ROOT), str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("MEGACPP_OVERLAYS_PLUGINS", "double")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "made_up_plugin", raising=False)
    upstream = Upstream("made_target", folder)
    upstream.write(text)
    return upstream


def site_of(environment: Environment) -> Path:
    """Return where an environment has its packages."""
    return next((environment.python.parent.parent / "lib").glob("python*/site-packages"))


def with_what_they_need(names: Iterable[str]) -> list[str]:
    """Return distributions with everything that they need, as far as it is installed here."""
    found: list[str] = []
    left = list(names)
    while left:
        found.append(left.pop())
        requirements = map(Requirement, importlib.metadata.requires(found[-1]) or ())
        left += [
            each.name
            for each in requirements
            if each.name not in {*found, *left} and (each.marker is None or each.marker.evaluate({"extra": ""}))
        ]
    return found


def link(site: Path, name: str) -> str:
    """Link an installed distribution into an environment; return its version."""
    found = importlib.metadata.distribution(name)
    for top in {file.parts[0] for file in found.files or () if file.parts[0] not in {"..", "__pycache__"}}:
        (site / top).symlink_to(Path(str(found.locate_file(top))))
    return found.version


def _describe(site: Path, name: str, version: str) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@dataclass(frozen=True)
class Packs:
    """A folder of packs with one pack, 99-double."""

    folder: Path

    def write(self, body: str = HONEST, *, device: str = "cpu", more: str = "") -> Path:
        """Write the reproducer, with more arguments of its case, and return it."""
        pack = self.folder / "99-double"
        pack.mkdir(parents=True, exist_ok=True)
        text = REPRODUCER.format(body=textwrap.indent(body, "    "), device=device, more=more)
        (pack / "reproduce.py").write_text(text)
        return pack / "reproduce.py"
