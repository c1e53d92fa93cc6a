"""Reproducers on a GPU: its description in the stamp, and one case that launches compiled kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from places import HANG_S, ROOT

from megacpp_overlays.runtime import visible_gpus

pytestmark = pytest.mark.gpu


def test_the_driver_and_torch_see_the_same_devices() -> None:
    import torch

    seen = [(gpu.name, gpu.capability) for gpu in visible_gpus.visible()]

    devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    assert seen == [(device.name, f"{device.major}.{device.minor}") for device in devices]
    assert re.fullmatch(r"[\d.]+", visible_gpus.visible()[0].driver)


@pytest.mark.upstream
def test_a_cuda_case_is_reproduced_and_its_overlay_validated() -> None:
    """Pack 58, whose defect every release of Liger has."""
    pytest.importorskip("liger_kernel")
    command = [sys.executable, "-m", "megacpp_overlays", "repro", "58", "--case", "gpu-bfloat16"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}

    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=HANG_S)

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"host: .*, \d+ x NVIDIA .*, compute capability \d+\.\d+, driver [\d.]+ \| ", done.stdout)
    assert re.findall(r"^([A-Z_]+): ", done.stdout, re.MULTILINE) == ["BUG_REPRODUCED", "FIX_VALIDATED"]
