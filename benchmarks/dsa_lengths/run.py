"""A layer of DeepSeek sparse attention at several lengths, as Megatron has it and under overlays: time and memory of a training step.

    python benchmarks/dsa_lengths/run.py [--json FILE] [--write FILE.md] [--plot FILE.svg]
    python benchmarks/dsa_lengths/run.py --device cpu --quick          runs every line, at sizes that are too small to measure

The model and its training are those of `benchmarks/dsa_training`: one layer, one document, a sparse loss of the indexer. A run is
WAY:TOKENS[:HEADS[:STEPS]]. page.py makes page and plot of the JSON again, on any host.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # parts are named from the folder of all benchmarks
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ.pop("MEGACPP_OVERLAYS", None)
    os.environ.setdefault("MEGACPP_OVERLAYS_LOG", "logging")

import megacpp_overlays

# isort: split
import argparse
import dataclasses
import traceback
from typing import Any

import progress
import report
import timing
import torch
from dsa_lengths import page, plot
from dsa_training import work
from dsa_training.run import DISTRIBUTIONS, QUICK_SIZE, SIZE

RUNS = (
    *(f"stock:{tokens}" for tokens in (4096, 8192)),
    *(f"stock, tilelang:{tokens}" for tokens in (4096, 8192, 16384, 32768)),
    *(f"overlays:{tokens}" for tokens in (4096, 8192, 16384, 32768, 65536)),
    "overlays:131072:16:20",
    "overlays:32768:128",
)
QUICK_RUNS = ("stock:40:4", "overlays:40:4", "overlays:24:4")
STEPS = 6
RATE = 3e-4


def main() -> None:
    """Train at each length, print the page, and write the files that the command line asks for."""
    chosen = arguments()
    base = QUICK_SIZE if chosen.quick else SIZE
    found: dict[str, Any] = {
        **timing.about(chosen.device, *DISTRIBUTIONS),
        "size": dataclasses.asdict(base),
        "rate": RATE,
        "runs": [],
        "problems": [],
    }
    watch = progress.Progress()
    with work.one_rank(chosen.device):
        megacpp_overlays.arm()
        megacpp_overlays.undo()
        for spec in watch.each([(each, each) for each in chosen.runs]):
            try:
                found["runs"].append(run(spec, base, chosen.device))
            except Exception:  # noqa: BLE001 - a fault of one run must not cost the others their turn on the GPU
                found["problems"].append(f"{spec}: {traceback.format_exc()}")
            timing.clear(chosen.device)
            found["seconds"] = round(watch.seconds, 1)
            report.keep(found, chosen.json)
    report.publish(found, chosen, page.markdown, plot.svg)
    if found["problems"]:
        sys.exit("\n".join(found["problems"]))


def run(spec: str, base: work.Size, device: str) -> dict[str, Any]:
    """Train once, WAY:TOKENS[:HEADS[:STEPS]]; where memory is short, `ms` and `mib` are None."""
    name, *numbers = spec.split(":")
    given = dict(zip(("tokens", "heads", "steps"), map(int, numbers), strict=False))
    size = dataclasses.replace(base, **{"steps": STEPS, **given})
    way = next(each for each in work.WAYS if each.name == name)
    result: dict[str, Any] = {"way": name, "tokens": size.tokens, "heads": size.heads, "steps": size.steps}
    if way.overlays:
        megacpp_overlays.arm()
    try:
        trained = work.train(size, way, work.weights(size, device), device, RATE)
    except torch.OutOfMemoryError:
        return {**result, "ms": None, "mib": None, "losses": []}
    finally:
        megacpp_overlays.undo()
    return {**result, "ms": trained["ms"], "mib": trained["mib"], "losses": trained["losses"]}


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="A layer of DeepSeek sparse attention at several lengths.")
    parser.add_argument("--json", type=Path, help="keep every number in this file, run by run")
    parser.add_argument("--write", type=Path, help="keep the page in this file")
    parser.add_argument("--plot", type=Path, help="keep the plot in this file, as SVG")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--runs", nargs="+", help="WAY:TOKENS[:HEADS[:STEPS]]")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few steps")
    chosen = parser.parse_args()
    chosen.runs = chosen.runs or (QUICK_RUNS if chosen.quick else RUNS)
    return chosen


if __name__ == "__main__":
    main()
