"""Attention over chosen keys, forward and backward: the kernels, Megatron's backends and bare products, on one GPU.

    python benchmarks/sparse_attention/run.py [--json FILE] [--write FILE.md] [--plot FILE.svg]
    python benchmarks/sparse_attention/run.py --device cpu --quick          every line of it, at sizes that say nothing

Megatron is the installed one as it is, and so are the forward passes of FlashMLA and of TileLang's example (peers.py). The
tables leave out contestants that are not installed, and mark those that do not fit into the GPU's memory. page.py makes page
and plot of the JSON again, on any host.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # parts are named from the folder of all benchmarks
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ.setdefault("MEGACPP_OVERLAYS", "off")  # Megatron as it is

import argparse
import traceback
from typing import Any

import progress
import report
import timing
import torch
from sparse_attention import page, plot, work
from sparse_attention.work import Shape

SHAPES = ("4096x4096x128x576x512", "4096x32768x128x576x512", "4096x4096x64x576x512", "4096x4096x16x576x512",
          "4096x4096x128x320x256", "4096x4096x128x192x128")  # fmt: skip
QUICK_SHAPES = ("8x40x5x48x32x16",)
DISTRIBUTIONS = ("triton", "megatron-core", "tilelang", "flash-mla")


def main() -> None:
    """Measure, print the page, and write the files that the command line asks for."""
    chosen = arguments()
    found: dict[str, Any] = {**timing.about(chosen.device, *DISTRIBUTIONS), "shapes": [], "problems": []}
    watch = progress.Progress()
    for shape in watch.each([(str(shape), shape) for shape in chosen.shape]):
        try:
            found["shapes"].append(measure(shape, chosen))
        except Exception:  # noqa: BLE001 - a fault at one shape must not cost the others their turn on the GPU
            found["problems"].append(f"{shape}: {traceback.format_exc()}")
        timing.clear(chosen.device)
        found["seconds"] = round(watch.seconds, 1)
        report.keep(found, chosen.json)
    report.publish(found, chosen, page.markdown, plot.svg)
    if found["problems"]:
        sys.exit("\n".join(found["problems"]))


def measure(shape: Shape, chosen: argparse.Namespace) -> dict[str, Any]:
    """Return times, memory and errors of all who take a shape."""
    each = work.problem(shape, chosen.device)
    who = work.contestants(shape, chosen.tilelang_example)
    racing = {name: work.stages(name, attend, each) for name, attend in who.items()}
    bare = work.floors(each)
    times = timing.race(racing | bare, chosen.device, rounds=chosen.rounds, limit_s=chosen.limit)
    for name, attend in who.items():
        one = times[name]
        if one is not None:
            one["mib"] = timing.extra_mib(racing[name], chosen.device)
            one["errors"] = work.errors(name, attend, each, min(32, shape.queries))
    return {
        "name": str(shape),
        "forward_flops": shape.forward_flops,
        "backward_flops": shape.backward_flops,
        "contestants": times,
    }


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="Attention over chosen keys, on a GPU.")
    parser.add_argument("--json", type=Path, help="keep every number in this file, shape by shape")
    parser.add_argument("--write", type=Path, help="keep the page in this file")
    parser.add_argument("--plot", type=Path, help="keep the plot in this file, as SVG")
    parser.add_argument("--shape", type=Shape.parse, nargs="+", help="QUERIESxKEYSxHEADSxDIMxVALUE, or with xSLOTS")
    parser.add_argument("--tilelang-example", type=Path, help="sparse_mla_fwd_pipelined.py of a checkout of TileLang")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--limit", type=float, default=10, help="seconds after which a race goes no further")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few turns")
    chosen = parser.parse_args()
    chosen.rounds = 3 if chosen.quick else chosen.rounds
    chosen.shape = chosen.shape or [Shape.parse(text) for text in (QUICK_SHAPES if chosen.quick else SHAPES)]
    return chosen


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
