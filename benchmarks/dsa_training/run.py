"""A layer of DeepSeek sparse attention that trains as Megatron has it and under overlays: how far apart rounding takes them.

    python benchmarks/dsa_training/run.py [--json FILE] [--write FILE.md] [--plot FILE.svg]
    python benchmarks/dsa_training/run.py --device cpu --quick          every line of it, at sizes that say nothing

Every way begins with the same weights and sees the same documents. Stock is megatron-core with no overlay, in bfloat16; in float32 it is
the truth. How far rounding alone takes a run is measured with stock, too: once more, and with the channels of hidden states in another
order, which is the same function. page.py makes page and plot of the JSON again, on any host.
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
import traceback
from dataclasses import asdict
from typing import Any

import progress
import report
import timing
import torch
from dsa_training import page, plot, work
from dsa_training.work import Size, Way

SIZE = Size(layers=1, hidden=2048, heads=16, latent=512, rotary=64, query=1536, indexer_heads=64, indexer=128, chosen=2048,
            tokens=4096, vocabulary=1024, steps=50)  # fmt: skip
QUICK_SIZE = Size(layers=1, hidden=32, heads=4, latent=24, rotary=8, query=16, indexer_heads=2, indexer=12, chosen=8,
                  tokens=40, vocabulary=16, steps=8)  # fmt: skip
DISTRIBUTIONS = ("triton", "megatron-core", "tilelang")


def main() -> None:
    """Train, print the page, and write the files that the command line asks for."""
    chosen = arguments()
    found: dict[str, Any] = {
        **timing.about(chosen.device, *DISTRIBUTIONS),
        "size": asdict(chosen.size),
        "rate": chosen.rate,
        "ways": {},
        "calls": {},
        "problems": [],
    }
    watch = progress.Progress()
    with work.one_rank(chosen.device):
        megacpp_overlays.arm()
        megacpp_overlays.undo()
        start = work.weights(chosen.size, chosen.device)
        some = [
            each for each in work.WAYS if each.name in chosen.ways and work.runs_here(each, chosen.size, chosen.device)
        ]
        for way in watch.each([(each.name, each) for each in some]):
            try:
                found["ways"][way.name] = run(way, start, chosen, found)
            except Exception:  # noqa: BLE001 - a fault of one way must not cost the others their turn on the GPU
                found["problems"].append(f"{way.name}: {traceback.format_exc()}")
            timing.clear(chosen.device)
            found["seconds"] = round(watch.seconds, 1)
            report.keep(found, chosen.json)
    report.publish(found, chosen, page.markdown, plot.svg)
    if found["problems"]:
        sys.exit("\n".join(found["problems"]))


def run(way: Way, start: dict[str, torch.Tensor], chosen: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """Train in one way; keep how often each overlay was called, where they are active."""
    if way.overlays:
        megacpp_overlays.arm()
    try:
        trained = work.train(chosen.size, way, start, chosen.device, chosen.rate)
        active = [each for each in megacpp_overlays.audit().records if each.decision.value == "active"]
    finally:
        megacpp_overlays.undo()
    if active and not way.overlays:
        raise RuntimeError(f"stock had {', '.join(each.overlay.id for each in active)}")
    calls = {each.overlay.id: sum(count for _, count in each.calls) for each in active}
    found["calls"] |= {name: count for name, count in calls.items() if count}
    return trained


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="Training with DeepSeek sparse attention, stock and under overlays.")
    parser.add_argument("--json", type=Path, help="keep every number in this file, way by way")
    parser.add_argument("--write", type=Path, help="keep the page in this file")
    parser.add_argument("--plot", type=Path, help="keep the plot in this file, as SVG")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rate", type=float, default=1e-3, help="of learning")
    every = [each.name for each in work.WAYS]
    parser.add_argument("--ways", nargs="+", choices=every, default=every)
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few steps")
    for name in asdict(SIZE):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="of the model, its data and its training")
    chosen = parser.parse_args()
    size = asdict(QUICK_SIZE if chosen.quick else SIZE)
    chosen.size = Size(**{name: getattr(chosen, name) or value for name, value in size.items()})
    if chosen.size.hidden in {chosen.size.query, chosen.size.latent, chosen.size.indexer}:
        parser.error("--hidden must be another number than --query, --latent and --indexer: its channels are reordered")
    return chosen


if __name__ == "__main__":
    main()
