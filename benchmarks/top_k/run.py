"""The k largest of each row: the kernel, torch.topk and a copy of as many bytes, on one GPU.

    python benchmarks/top_k/run.py [--json FILE] [--write FILE.md]
    python benchmarks/top_k/run.py --device cpu --quick          every line of it, at sizes that say nothing

A contestant that does not fit into the GPU's memory is reported. page.py makes the page of the JSON again, on any host.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # parts are named from the folder of all benchmarks
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import traceback
from typing import Any

import progress
import report
import timing
import torch
from top_k import page, work
from top_k.work import Shape

SHAPES = ("32768x4096x2048", "32768x4096x512", "8192x8192x2048", "4096x16384x2048", "4096x32768x2048")
QUICK_SHAPES = ("8x40x20", "4x64x64")


def main() -> None:
    """Measure, print the page, and write the files that the command line asks for."""
    chosen = arguments()
    found: dict[str, Any] = {**timing.about(chosen.device, "triton"), "shapes": [], "problems": []}
    watch = progress.Progress()
    cases = [(f"{shape}, {kind}", (shape, kind)) for shape in chosen.shape for kind in work.KINDS]
    for shape, kind in watch.each(cases):
        try:
            found["shapes"].append(measure(shape, kind, chosen))
        except Exception:  # noqa: BLE001 - a fault at one shape must not cost the others their turn on the GPU
            found["problems"].append(f"{shape}, {kind}: {traceback.format_exc()}")
        timing.clear(chosen.device)
        found["seconds"] = round(watch.seconds, 1)
        report.keep(found, chosen.json)
    report.publish(found, chosen, page.markdown)
    if found["problems"]:
        sys.exit("\n".join(found["problems"]))


def measure(shape: Shape, kind: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Return times and memory of all who choose of a shape, and whether ours is right."""
    numbers = work.scores(shape, kind, chosen.device)
    who = work.contestants(numbers, shape)
    times = timing.race(who, chosen.device, rounds=chosen.rounds, burst_ms=chosen.burst, limit_s=chosen.limit)
    for name, stages in who.items():
        if (one := times[name]) is not None:
            one["mib"] = timing.extra_mib(stages, chosen.device)
    return {"name": str(shape), "kind": kind, "contestants": times, "right": work.is_right(numbers, shape)}


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="The k largest of each row, on a GPU.")
    parser.add_argument("--json", type=Path, help="keep every number in this file, shape by shape")
    parser.add_argument("--write", type=Path, help="keep the page in this file")
    parser.add_argument("--shape", type=Shape.parse, nargs="+", help="ROWSxKEYSxK")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each contestant")
    parser.add_argument("--burst", type=float, default=10, help="milliseconds that a turn lasts at least")
    parser.add_argument("--limit", type=float, default=10, help="seconds after which a race goes no further")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few turns")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.burst = 3, 0
    chosen.shape = chosen.shape or [Shape.parse(text) for text in (QUICK_SHAPES if chosen.quick else SHAPES)]
    return chosen


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
