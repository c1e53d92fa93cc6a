"""Child processes of a launcher end in the same state, however they are started. Also a plugin, end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from made_up import Upstream

LAUNCHER = """
import megacpp_overlays
import importlib, json, multiprocessing, sys

NAME, METHOD, IMPORTED = sys.argv[1], sys.argv[2], sys.argv[3] == "imported"

def state(_=None):
    module = importlib.import_module(NAME + ".layers")
    decision = [record.decision.value for record in megacpp_overlays.audit().records if record.overlay.id == "double-fix"]
    return [module.double(1), module.double.__wrapped__(1), *decision]

if __name__ == "__main__":
    if IMPORTED:
        state()
    with multiprocessing.get_context(METHOD).Pool(1) as pool:
        child = pool.apply(state)
        # A function that a seam replaced travels by reference and arrives as the seam of the other side.
        travelled = pool.apply(importlib.import_module(NAME + ".layers").double, (1,))
    print(json.dumps({"parent": state(), "child": child, "travelled": travelled}))
"""


def launch(upstream: Upstream, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the launcher with the made-up overlay as an installed plugin."""
    upstream.write(
        f"from made_up import Upstream\nOVERLAY = Upstream({upstream.name!r}, None).overlay()\n", module="plugin"
    )
    info = upstream.folder / "made_up_plugin-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[megacpp_overlays.overlays]\ndouble = {upstream.name}.plugin:OVERLAY\n")
    launcher = upstream.folder / "launcher.py"
    launcher.write_text(LAUNCHER)
    path = os.pathsep.join(map(str, (upstream.folder, Path(__file__).parent, ROOT)))
    env = {**os.environ, "PYTHONPATH": path, "MEGACPP_OVERLAYS_PLUGINS": "double", **variables}
    return subprocess.run(
        [sys.executable, str(launcher), upstream.name, *arguments], env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("imported", ["imported", "armed"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_ends_in_the_state_of_its_parent(upstream: Upstream, method: str, imported: str) -> None:
    done = launch(upstream, method, imported)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"parent": [2, 3, "active"], "child": [2, 3, "active"], "travelled": 2}


def test_switches_reach_children_through_the_environment(upstream: Upstream) -> None:
    done = launch(upstream, "spawn", "armed", MEGACPP_OVERLAY_DOUBLE_FIX="off")

    assert done.returncode == 1  # `double` has no `__wrapped__` when nothing is installed
    assert "has no attribute '__wrapped__'" in done.stderr
    assert "off: double-fix" in done.stderr
