"""Run a script on a release of Megatron-Core in a process of its own, and read its JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import warm_python
from places import HANG_S, SUPPORT
from unpacked import unpacked

MODELS = ("megatron.core.transformer.transformer_layer", "megatron.core.models.gpt.gpt_model")
"""Modules of every release, which import most of it."""

ALL_ON = {
    f"MEGACPP_OVERLAY_{name}": "on"
    for name in (
        "CP_LOCAL_LOSS_MEAN",
        "GLOBAL_AUX_LOSS_SCALE",
        "LATENT_MOE_FC2_INIT",
        "MLA_SOFTMAX_SCALE",
        "MTP_TOKEN_COUNTS_LOCAL",
        "MUON_GATED_FC1",
        "TP_LABEL_SMOOTHING",
    )
}
"""Variables of a process in which these overlays are on, too, which are off by default: one process is copied for all of them."""


def said(wheel: Path, script: Path, *words: str | Path, imported: bool = True, **variables: str) -> Any:
    """Return the JSON that a script prints for a release.

    Args:
        wheel: of the release, whose modules the script imports before any that are installed.
        script: in Python; it may import the modules of `tests/support`.
        words: its arguments.
        imported: whether the process is a copy of one that has imported the release: armed with the same switches, or, where
            these are off, without this package. Not for a script that does something before it imports Megatron.
        variables: of its environment, in addition to those of this process.
    """
    release = str(unpacked(wheel))
    path = os.pathsep.join([release, str(SUPPORT)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_CUDA_ARCH_LIST": "9.0", **variables}
    after, found = warm_python.UNCOMPILED, ()
    if imported:
        armed = () if env.get("MEGACPP_OVERLAYS") == "off" else (warm_python.ARMED,)
        after, found = (*armed, *after, *MODELS), (release,)
    done = warm_python.run(["-W", "ignore", script, *words], env, after=after, timeout=HANG_S, path=found)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
