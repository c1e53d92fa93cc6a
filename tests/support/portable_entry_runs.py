"""Runs of the portable entry in processes of their own, one or one a rank, and the errors that each case may have."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import warm_python
from places import HANG_S, ROOT, SUPPORT
from portable_entry_cases import Case
from trees import STAND_INS
from warm_python import WarmProcess

GRID = SUPPORT / "portable_entry_grid.py"


DEV = STAND_INS["dev-linear-cross-entropy"]


LIMITS = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
"""Largest relative error of a gradient: float32 arithmetic, then one rounding for the products and one at the end."""


FAR = 1e-3
"""The same where a logit of some hundreds is itself rounded in float32."""


CANCELLED = 1e-2
"""The same for the hidden states then: one feature's gradient is the shift times a sum that is zero but for rounding."""


LOSS = 1e-5
"""Largest relative error of the loss, in every dtype: products and sums are float32."""


def limits(case: Case) -> dict[str, float]:
    if case.shift:
        return {"loss": FAR, "hidden": CANCELLED, "weight": FAR}
    return {"loss": LOSS, "hidden": LIMITS[case.dtype], "weight": LIMITS[case.dtype]}


KEEP = {"MEGACPP_LINEAR_CE_LOGITS": "keep"}


def limits_of_kept(case: Case) -> dict[str, float]:
    """Logits are then rounded to the dtype of the hidden states, and so is all that comes of them."""
    return {**limits(case), "loss": LIMITS[case.dtype]} if not case.shift else limits(case)


def check(result: dict[str, Any], case: Case, allowed: dict[str, float] | None = None) -> None:
    assert result["problems"] == []
    allowed = allowed or limits(case)
    assert {name: error for name, error in result["errors"].items() if not error < allowed[name]} == {}


def environment(tree: Path, request: dict[str, Any], variables: dict[str, str]) -> dict[str, str]:
    path = os.pathsep.join([str(tree), str(ROOT), str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "TRITON_INTERPRET": "1" if request["device"] == "cpu" else "0",
        "MEGACPP_OVERLAYS_LOG": "logging",
        "PORTABLE_ENTRY": json.dumps(request),
        **variables,
    }


def start(tree: Path, request: dict[str, Any], variables: dict[str, str]) -> WarmProcess:
    command = ["-W", "ignore", GRID]
    return warm_python.start(command, environment(tree, request, variables), after=warm_python.INTERPRETER)


def finish(running: WarmProcess) -> dict[str, Any]:
    out, err = running.communicate(timeout=HANG_S)
    assert running.returncode == 0, err[-4000:]
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    return report


def run_grid(tree: Path, variables: dict[str, str] | None = None, **request: Any) -> dict[str, Any]:
    """Return the report of one process."""
    return finish(start(tree, request, variables or {}))


def run_ranks(tree: Path, rendezvous: Path, cases: list[str], backend: str, devices: list[str], **more: Any) -> Any:
    """Return the reports of a tensor-parallel group, one process a rank."""
    group = {"cases": cases, "backend": backend, "ranks": len(devices), "rendezvous": str(rendezvous), **more}
    running = [start(tree, {**group, "rank": rank, "device": device}, {}) for rank, device in enumerate(devices)]
    try:
        return [finish(each) for each in running]
    finally:
        for each in running:
            each.kill()
