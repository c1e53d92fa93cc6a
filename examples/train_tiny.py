"""Train a tiny Megatron model with the overlays armed, and show the effect of two of them.

    python examples/train_tiny.py                          one process, on the GPU if there is one
    torchrun --nproc-per-node 2 examples/train_tiny.py     data parallel: NCCL on GPUs, gloo on CPUs
    MEGACPP_OVERLAYS=off python examples/train_tiny.py     upstream as it is

The same model is built and measured twice, with the overlays undone and with them armed; then it trains with them.
The exit code is 1 when ranks do not run the same code, when an overlay did not have its effect, or when the loss
did not fall.
"""

from __future__ import annotations

import megacpp_overlays  # first, before torch and every upstream: then no module can hold an original

# isort: split
import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import demo_report
import torch
import torch.distributed as dist

from megacpp_overlays.loader import lines

if TYPE_CHECKING:
    from side_by_side import Measurement

Say = Callable[[str], None]


def main() -> int:
    """Run the demo and return its exit code."""
    started, args = time.monotonic(), parse_arguments()
    device = choose_device(args.device)
    if device.type == "cpu":
        # Triton reads this when it is imported, and Liger imports Triton; `import torch` alone does not.
        os.environ["TRITON_INTERPRET"] = "1"
    # Megatron and Liger come in here. Their overlays are decided on the way.
    from tiny_training import process_group

    with process_group(device):
        is_first = dist.get_rank() == 0
        say: Say = print if is_first else lambda _text: None
        say(f"{demo_report.heading(device.type, dist.get_world_size())}\n\n{megacpp_overlays.audit()}\n")
        try:
            megacpp_overlays.verify_ranks()  # before step 1: every rank runs the same code, or none runs
        except megacpp_overlays.RanksError as error:
            say(str(error))
            return 1
        off, on = measure_off_and_on(args.seed, device)
        audit = megacpp_overlays.audit()
        decisions = {record.overlay.id: record.decision.value for record in audit.records}
        say(f"{demo_report.comparison(decisions, off, on)}\n\nTraining in that last state")
        losses = train(args.seed, args.steps, device, say)
        claims = demo_report.judge(decisions, on, losses)
        elapsed = time.monotonic() - started
        used = demo_report.used(lines.calls(megacpp_overlays.audit().records))
        say("\n".join(["", used, "", *map(str, claims), "", f"{elapsed:.0f} s"]))
        if args.json and is_first:
            run = {"device": device.type, "world_size": dist.get_world_size(), "elapsed_s": elapsed}
            measured = {"audit": audit.as_dict(), "off": asdict(off), "on": asdict(on), "losses": losses}
            report = {**run, **measured, "claims": [asdict(claim) for claim in claims]}
            args.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(any(claim.outcome == "FAILED" for claim in claims))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a tiny Megatron model; show two overlays off and on.")
    parser.add_argument("--steps", type=int, default=30, help="training steps (default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the data (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write everything measured to this file")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps must be at least 2: the loss has to fall")
    return args


def choose_device(wanted: str) -> torch.device:
    """Return the device of this rank, and make a GPU the current one."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def measure_off_and_on(seed: int, device: torch.device) -> tuple[Measurement, Measurement]:
    """Measure the same model on upstream as it is, then with the overlays that the environment allows."""
    from side_by_side import measure
    from tiny_training import batches

    batch = next(batches(seed, device))
    megacpp_overlays.undo()
    off = measure(seed, batch)
    megacpp_overlays.arm()
    return off, measure(seed, batch)


def train(seed: int, steps: int, device: torch.device, say: Say) -> list[float]:
    """Train a fresh model and return the loss of every step."""
    from side_by_side import build_wrapped
    from tiny_training import MegatronTraining, TorchTraining, batches, step_losses

    model, _ = build_wrapped(seed, device)
    training = MegatronTraining(model) if device.type == "cuda" else TorchTraining(model)
    losses = []
    for step, loss in enumerate(step_losses(training, batches(seed, device), steps), start=1):
        losses.append(loss)
        if step in {1, steps} or step % 5 == 0:
            say(f"  step {step:3}  loss {loss:.3f}")
    return losses


if __name__ == "__main__":
    sys.exit(main())
