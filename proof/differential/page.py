"""The table as data and as a page."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
from pathlib import Path
from typing import Any

import torch
from differential.judged import GOOD, judged
from differential.rows import Row

PACKAGES = ("fla", "mamba_ssm", "transformer_engine")
"""Packages for which overlays repair Megatron's use of them."""


def receipts(folder: Path, rows: list[Row], on_gpu: bool) -> dict[str, Any]:
    """Return the results of all rows, and the active overlays that none of them called."""
    found = [judged(folder, row) for row in rows]
    called = sorted({name for each in found for name, number in each.calls.items() if number})
    active = sorted({name for each in found for name in each.calls})
    audit = json.loads((folder / "audit.json").read_text())
    return {
        "holds": all(each.outcome in GOOD for each in found),
        "over": _devices() if on_gpu else "gloo, on a CPU",
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "megatron-core")},
        "python": platform.python_version(),
        "fingerprint": audit["fingerprint"],
        "rows": [each.as_dict() for each in found],
        "active": active,
        "never called": [name for name in active if name not in called],
        "not installed": [name for name in PACKAGES if importlib.util.find_spec(name) is None],
        "seconds": round(sum(each.seconds for each in found), 1),
    }


def _devices() -> str:
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return f"NCCL, on {len(names)} of {names[0]}"


def page(found: dict[str, Any]) -> str:
    """Return the page of receipts."""
    lines = [
        "# Stock and all overlays, side by side",
        "",
        "One training step of a small model in each row: its losses, every whole gradient, the norm by which gradients are clipped, the "
        "step of the optimizer, and the auxiliary losses that are logged. The truth is float64 on one rank without overlays. "
        "Numbers are the worst distance from it, of the largest value of each tensor; up to `rounding`, which is four times that of one rank (eight in float32) "
        "in the same dtype, it is rounding. Calls are those on one rank.",
        "",
        f"{found['over']}; torch {found['versions']['torch']}, megatron-core {found['versions']['megatron-core']}, "
        f"Python {found['python']}; audit {found['fingerprint']}.",
        "",
        "| row | ranks | outcome | stock | overlays | rounding | worst number | overlays called |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(each) for each in found["rows"]]
    never, absent = (", ".join(found[each]) or "none" for each in ("never called", "not installed"))
    lines += [
        "",
        f"{len(found['active'])} overlays were active. Never called in any row: {never}. Not installed: {absent}.",
        "",
    ]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    stock, ours, limit = (
        "ends" if row[each] is None else f"{row[each]:.1e}" for each in ("stock", "overlays", "rounding")
    )
    worst = row["error"] or row["worst"]
    called = ", ".join(row["calls"]) or "none"
    return f"| {row['row']} | {row['ranks']} | {row['outcome']} | {stock} | {ours} | {limit} | {worst} | {called} |"
