"""Signatures of seams: each seam of an active overlay takes every call that upstream's signature allows, on the releases of the lanes."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from places import HANG_S, ROOT, SUPPORT
from releases import only

from megacpp_overlays.loader.listed import LISTED
from megacpp_overlays.model import variable_for

pytestmark = pytest.mark.upstream

LANES = ("newest", "summer-2026", "spring-2026", "edge")
DAILY = ("newest",)
STAND_IN = ROOT / "tests/empty_modules"
"""Empty modules in the place of imports of mamba_ssm that a host without a CUDA toolkit cannot build."""
FEWEST = 35
"""Seams that are in on each of these lanes."""


@pytest.mark.parametrize("lane", only(LANES, DAILY))
def test_seams_take_the_arguments_of_upstream_s_functions_with_the_same_defaults(lane: str) -> None:
    python = ROOT / f".envs/{lane}/bin/python"
    assert python.exists(), f"there is no {python}: run `make setup`"
    installing = [each for each in LISTED if each.installs]
    targets = sorted({target for each in installing for target in each.targets})
    on = {variable_for(each.id): "on" for each in installing if each.off_by_default}
    env = {**os.environ, **on, "PYTHONPATH": os.pathsep.join(map(str, (SUPPORT, STAND_IN))), "OMP_NUM_THREADS": "1"}

    done = subprocess.run(
        [python, "-W", "ignore", SUPPORT / "call_forms.py", *targets],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    refused = json.loads(done.stdout)
    assert len(refused) >= FEWEST
    assert {seam: calls for seam, calls in refused.items() if calls} == {}
