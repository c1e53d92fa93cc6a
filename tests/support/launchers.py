"""Launchers of the made-up upstream: its overlay is an installed plugin, as in a real environment."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from made_up import Upstream, install_plugin
from places import HANG_S, ROOT

HERE = Path(__file__).resolve().parent


def environment(upstream: Upstream, **variables: str) -> dict[str, str]:
    """Install the overlay as a plugin; return an environment in which it is found and nothing is printed."""
    upstream.write(
        f"from made_up import Upstream\nOVERLAY = Upstream({upstream.name!r}, None).overlay()\n", module="plugin"
    )
    install_plugin(upstream.folder, f"{upstream.name}.plugin:OVERLAY")
    path = os.pathsep.join(map(str, (upstream.folder, HERE, ROOT)))
    ours = {"PYTHONPATH": path, "MEGACPP_OVERLAYS_PLUGINS": "double", "NAME": upstream.name}
    return {**os.environ, **ours, **variables}


def write(upstream: Upstream, code: str, name: str = "launcher") -> Path:
    """Write a launcher next to the upstream, in a folder of its own that only `sys.path[0]` leads to."""
    folder = upstream.folder / "launchers"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(code))
    return path


def launch(
    *words: str | Path, env: dict[str, str], stdin: str = "", cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a Python with these arguments."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, env=env, input=stdin, cwd=cwd, capture_output=True, text=True, timeout=HANG_S, check=False
    )
