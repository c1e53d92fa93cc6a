"""The seam with the compiled Transformer Engine and its hazards: on the CPU, with the real megatron-core.

`make te` builds the environment, about 20 minutes once. Without it these tests are skipped; the Python half of the
same releases is tested in test_fp8_engine_releases.py everywhere.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess

import pytest
from places import HANG_S, ROOT, SUPPORT

pytestmark = pytest.mark.upstream

PYTHON = ROOT / ".envs" / "te" / "bin" / "python"
SCRIPT = SUPPORT / "fp8_engine_cases.py"
CASES = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
]


@pytest.fixture(scope="module")
def report() -> dict[str, str]:
    """Run all cases in one process: importing the engine takes longer than they do."""
    if not PYTHON.exists():
        pytest.skip(f"no {PYTHON.relative_to(ROOT)}: run `make te`")
    env = {**os.environ, "MEGACPP_OVERLAYS": "off", "PYTHONPATH": str(ROOT)}
    env["MEGACPP_OVERLAYS_SMALL_CALLS"] = "overlay"
    command = [str(PYTHON), "-W", "ignore", str(SCRIPT)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", CASES)
def test_with_the_compiled_engine(case: str, report: dict[str, str]) -> None:
    assert report[case] == "passed", report[case]


def test_every_case_ran(report: dict[str, str]) -> None:
    assert sorted(report) == sorted(CASES)
