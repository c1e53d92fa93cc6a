"""Report of the demo on its measurements, with a check that the overlays did their repairs. Standard library only."""

from __future__ import annotations

import importlib.metadata
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from side_by_side import Measurement

EXEMPTION, LOSS = "float16-fp32-exemption", "liger-flce-none-backward"
"""The overlays that the demo is about."""

TOLERANCE = 1e-4
"""For fp32 gradients relative to their largest value: rounding is 1e-6 or less, the defect is about 1."""


@dataclass(frozen=True)
class Claim:
    """One sentence about this run, and whether it is as it should be."""

    says: str
    outcome: str
    """`ok`; `broken` where the user switched the overlay off; `FAILED` where the overlay was on."""

    def __str__(self) -> str:
        return f"  {self.outcome:6}  {self.says}"


def heading(device: str, ranks: int) -> str:
    """Return one line about the machinery; the audit names the upstreams that were really loaded."""
    versions = [_version(name) for name in ("torch", "triton", "transformer-engine")]
    how = "CUDA" if device == "cuda" else "CPU with Triton's interpreter"
    return f"{', '.join(versions)}; {how}; {ranks} rank{'s' if ranks > 1 else ''}"


def _version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {name}"


def comparison(decisions: Mapping[str, str], off: Measurement, on: Measurement) -> str:
    """Return both measurements side by side, each column under the state of its overlay."""
    exempt = [
        ["", "", "overlay off", "", f"overlay {_state(EXEMPTION, decisions)}", ""],
        ["parameter", "values", "dtype", "changed", "dtype", "changed"],
    ]
    for name, was in off.exempt.items():
        now = on.exempt[name]
        shown = name.removeprefix("decoder.")
        exempt.append([shown, str(was.values), was.dtype, str(was.changed), now.dtype, str(now.changed)])
    errors = [["gradient of", "overlay off", f"overlay {_state(LOSS, decisions)}"]]
    errors += [[role, f"{error:.1e}", f"{on.gradient_error[role]:.1e}"] for role, error in off.gradient_error.items()]
    return "\n".join(
        [
            "Exempt parameters through Float16Module: number of changed values",
            *_table(exempt),
            "",
            "Liger's per-token loss under a mask: largest gradient error against plain PyTorch in fp32, relative",
            *_table(errors),
        ]
    )


def _state(overlay: str, decisions: Mapping[str, str]) -> str:
    return decisions.get(overlay, "absent")


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [f"  {line}".rstrip() for line in lines]


def used(counts: Mapping[str, int]) -> str:
    """Say how often the seams of each active overlay were called, so that one that nothing uses is seen."""
    called = [f"{name} {count}" for name, count in counts.items() if count]
    unused = [name for name, count in counts.items() if not count]
    lines = [f"Calls of active overlays: {', '.join(called) or 'none'}"]
    lines += [f"Active, and this model does not use them: {', '.join(unused)}"] if unused else []
    wrap = textwrap.TextWrapper(79, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(line for each in lines for line in wrap.wrap(each))


def judge(decisions: Mapping[str, str], on: Measurement, losses: Sequence[float]) -> list[Claim]:
    """Return the claims about this run. A defect is a failure unless the user switched its overlay off."""
    kept = [exempt for exempt in on.exempt.values() if exempt.dtype == "float32" and not exempt.changed]
    all_kept = len(kept) == len(on.exempt)
    error = max(on.gradient_error.values())
    quarter = max(1, len(losses) // 4)
    first, last = (sum(part) / quarter for part in (losses[:quarter], losses[-quarter:]))

    def claim(says: str, overlay: str, *, holds: bool) -> Claim:
        state = _state(overlay, decisions)
        unwanted = "broken" if state == "disabled" else "FAILED"
        return Claim(f"{says} ({overlay} is {state})", "ok" if holds else unwanted)

    return [
        claim(f"{len(kept)} of {len(on.exempt)} exempt parameters are fp32 with every bit", EXEMPTION, holds=all_kept),
        claim(f"the largest gradient error is {error:.1e}", LOSS, holds=error < TOLERANCE),
        claim(f"the loss went from {first:.2f} to {last:.2f}", LOSS, holds=last < first),
    ]
