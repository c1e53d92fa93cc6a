"""A whole training step of a Megatron model with four ways to compute its loss: the effect of the loss where it is used.

    python benchmarks/linear_cross_entropy_step/run.py [--json FILE] [--write FILE.md] [--plot FILE.svg]
    TRITON_INTERPRET=1 python benchmarks/linear_cross_entropy_step/run.py --device cpu --quick

The demo's model of examples/, scaled to the GPU: a GPTModel of megatron-core with the local spec inside Float16Module,
and torch's fused AdamW. All ways share one model and take turns. Overlays are off: Megatron and Liger are as they are,
and the kernel is called by name. linear_cross_entropy_step_page.py makes the page of the JSON again, on any host.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # parts are named from the folder of all benchmarks
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

# Before any of these is imported: no overlay takes part, NVLink multicast stays alone (see
# linear_cross_entropy_ranks.py), and Triton reads on import whether it interprets.
os.environ["MEGACPP_OVERLAYS"] = "off"
os.environ.setdefault("MEGACPP_OVERLAYS_LOG", "logging")
os.environ["NCCL_NVLS_ENABLE"] = "0"
if "cpu" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# isort: split
import report
import timing
import torch
from linear_cross_entropy_step import page
from linear_cross_entropy_step.work import WAYS, Batch, Size, Training, build
from progress import Progress
from tiny_training import process_group

SIZE = Size(layers=8, hidden=4096, heads=32, sequence=4096, batch=2, vocabulary=131072)
QUICK_SIZE = Size(layers=2, hidden=32, heads=2, sequence=24, batch=2, vocabulary=96)
NOT_OURS_MIB = 3072
"""Memory of the device for CUDA, its libraries and gaps between blocks; an estimate, which need not be exact."""


class Bench:
    """One model, and its measurements."""

    def __init__(self, chosen: argparse.Namespace, device: torch.device) -> None:
        self.chosen = chosen
        self.size = chosen.size
        self.device = device
        self.batch = Batch.draw(self.size, device, self.size.batch)
        self.training = Training(build(self.size, device), device)

    def agreement(self) -> dict[str, Any]:
        """Return losses and errors on the same parameters."""
        return dict(self.training.agreement(self.batch, self.chosen.ways))

    def trajectory(self) -> dict[str, list[float]]:
        """Return the losses of the first steps of each way, from the same parameters, on one batch."""
        start = [parameter.detach().clone() for parameter in self.training.model.parameters()]
        return {way: self.training.trajectory(way, self.batch, self.chosen.steps, start) for way in self.chosen.ways}

    def times(self) -> dict[str, dict[str, Any]]:
        """Return the medians of a whole step, and of its output layer and loss alone."""
        steps = {way: self.training.stages(way, self.batch) for way in self.chosen.ways}
        parts = {f"{way}, alone": self.training.loss_part(way, self.batch) for way in self.chosen.ways}
        return timing.race(steps | parts, self.device.type, rounds=self.chosen.rounds, limit_s=self.chosen.limit)

    def memory(self) -> dict[str, dict[str, Any]]:
        """Return the peak of a whole step, and how much of it is held between steps, in MiB."""
        return {way: self.peak(way, self.batch) for way in self.chosen.ways}

    def peak(self, way: str, batch: Batch) -> dict[str, Any]:
        """Return the peak of a step, and the memory held between steps, in MiB."""
        above = timing.extra_mib(self.training.stages(way, batch), self.device.type)
        held = 0 if self.device.type == "cpu" else torch.cuda.memory_allocated() / 2**20
        return {"held_mib": held, "step_mib": above}

    def largest(self) -> dict[str, dict[str, Any]]:
        """Return the largest micro-batch that fits, of each way, and the smallest that was seen not to."""
        return {way: self.largest_of(way) for way in self.chosen.ways}

    def largest_of(self, way: str) -> dict[str, Any]:
        """Search from a guess, one sample up or down at a time, as long as a quarter of the limit lasts."""
        started, fits, fails = time.perf_counter(), self.size.batch, None
        guess, most = self.guess(way), self.chosen.largest_batch
        while (
            fails != fits + 1
            and fits < most
            and time.perf_counter() - started < self.chosen.limit / len(self.chosen.ways)
        ):
            samples = max(fits + 1, min(guess, most, (fails or most + 1) - 1))
            timing.clear(self.device.type)
            stages = self.training.stages(way, Batch.draw(self.size, self.device, samples))
            if timing.fits(stages, self.device.type):
                fits, guess = samples, samples + 1
            else:
                self.training.optimizer.zero_grad()
                fails, guess = samples, samples - 1
        return {"batch": fits, "fails": fails}

    def guess(self, way: str) -> int:
        """Return how many samples should fit by the growth of the peak; the next one where nothing is known."""
        batch = self.size.batch
        small, large = (self.peak(way, Batch.draw(self.size, self.device, samples)) for samples in (batch, 2 * batch))
        if small["step_mib"] is None or large["step_mib"] is None:
            return batch + 1
        grows = (large["step_mib"] - small["step_mib"]) / batch
        room = torch.cuda.mem_get_info()[1] / 2**20 - NOT_OURS_MIB - small["held_mib"] - small["step_mib"]
        return batch + max(1, int(room / grows))


SECTIONS: dict[str, Callable[[Bench], Any]] = {
    each.__name__: each for each in (Bench.agreement, Bench.trajectory, Bench.times, Bench.memory, Bench.largest)
}


def main() -> None:
    """Measure, print the page, and write the files that the command line asks for."""
    chosen = arguments()
    device = torch.device(chosen.device, *([0] if chosen.device == "cuda" else []))
    found = about(chosen)
    progress = Progress()
    with process_group(device):
        bench = Bench(chosen, device)
        found["parameters"] = sum(each.numel() for each in bench.training.model.parameters())
        for name in progress.each((each, each) for each in chosen.sections):
            try:
                found[name] = SECTIONS[name](bench)
            except Exception:  # noqa: BLE001 - a fault of one section must not cost the others their turn on the GPU
                found["problems"].append(f"{name}: {traceback.format_exc()}")
            found["seconds"] = round(progress.seconds, 1)
            report.keep(found, chosen.json)
            bench.training.optimizer.zero_grad()
            timing.clear(chosen.device)
    report.publish(found, chosen, page.markdown, page.svg)
    if found["problems"]:
        sys.exit("\n".join(found["problems"]))


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="A whole training step with four ways to have its loss.")
    parser.add_argument("--json", type=Path, help="keep every number in this file, section by section")
    parser.add_argument("--write", type=Path, help="keep the page in this file")
    parser.add_argument("--plot", type=Path, help="keep the plot in this file, as SVG")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, help="turns of each way")
    parser.add_argument("--steps", type=int, default=4, help="steps of the compared trajectories")
    parser.add_argument(
        "--limit", type=float, default=24, help="seconds after which a race or a search goes no further"
    )
    parser.add_argument("--largest-batch", type=int, help="where the search for the largest micro-batch ends")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few turns")
    for name in asdict(SIZE):
        parser.add_argument(f"--{name}", type=int, help="of the model and its data")
    chosen = parser.parse_args()
    size = asdict(QUICK_SIZE if chosen.quick else SIZE)
    chosen.size = Size(**{name: getattr(chosen, name) or value for name, value in size.items()})
    chosen.rounds = chosen.rounds or (3 if chosen.quick else 7)
    chosen.largest_batch = chosen.largest_batch or (4 if chosen.quick else 64)
    return chosen


def about(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return date, host, versions and sizes."""
    found = timing.about(chosen.device, "triton", "megatron-core", "liger-kernel")
    return {**found, "size": asdict(chosen.size), "problems": []}


if __name__ == "__main__":
    main()
