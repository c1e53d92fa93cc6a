"""Claims about upstream that need a GPU: each is shown by the reproducer of its pack."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from places import HANG_S, ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.upstream]


@pytest.mark.parametrize(
    ("pack", "case", "needs"),
    [(4, "gpu", "mamba_ssm"), (4, "gpu-speed", "mamba_ssm"), (14, "gpu", "tilelang")],
)
def test_a_claim_holds_on_this_gpu(pack: int, case: str, needs: str) -> None:
    if find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    command = [sys.executable, "-m", "megacpp_overlays", "repro", str(pack), "--case", case]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}

    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=HANG_S)

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^([A-Z_]+): ", done.stdout, re.MULTILINE) == ["CLAIM_HOLDS"]
