"""Processes under instrumentation are armed, whichever of the two comes first, and so are their children."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from places import HANG_S, ROOT

from megacpp_overlays.processes import children

pytestmark = pytest.mark.unmeasured_children


def test_a_start_up_hook_that_calls_no_other_arms_by_the_entry_point_that_it_offers(
    tmp_path: Path, run_python: Callable[..., CompletedProcess[str]]
) -> None:
    """As opentelemetry-instrument, whose `sitecustomize` comes first in every child."""
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib.metadata import entry_points\n"
        "for each in entry_points(group='opentelemetry_pre_instrument'):\n"
        "    each.load()()\n"
    )
    env = children.child_environment()
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    code = "import sys; print('megacpp_overlays' in sys.modules)"

    assert run_python(code, **env).stdout == "True\n"
    elsewhere = {**env, children.CHILDREN: "another environment"}
    assert run_python(code, **elsewhere).stdout == "False\n"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="-P is new in Python 3.11")
def test_under_safe_path_the_first_entry_of_the_path_is_pythons(tmp_path: Path) -> None:
    code = "import sys; print(sys.path[0])"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MEGACPP_OVERLAYS_LOG": "logging"}

    def first(*words: str) -> str:
        command = [sys.executable, *words, "-P", "-c", code]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_S, check=True).stdout

    assert first("-m", "megacpp_overlays", "run") == first()


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_the_version_of_python_is_asked_for_without_a_launcher(option: str) -> None:
    env = {**os.environ, "MEGACPP_OVERLAYS_LOG": "logging"}

    def said(*words: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=HANG_S)
        return done.returncode, done.stdout

    assert said("-m", "megacpp_overlays", "run", option) == said(option)
