"""A layer of DeepSeek sparse attention whose tokens are split over the GPUs of one host by Megatron's context parallelism.

    python benchmarks/dsa_ranks/run.py [--json FILE] [--write FILE.md]
    python benchmarks/dsa_ranks/run.py --device cpu --quick          every line of it, with gloo, at sizes that say nothing

The model and its training are those of `benchmarks/dsa_lengths`, under overlays. Each number of ranks is a launch of its own under
torchrun. Ranks hold the mean of their gradients against those of one rank that has the whole document, and train. A run is
TOKENS[:STEPS]. page.py makes the page of the JSON again, on any host.
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
import json
import subprocess
import tempfile
from typing import Any

import progress
import report
import timing
import torch
import torch.distributed as dist
from dsa_ranks import page, work
from dsa_ranks.work import Place
from dsa_training.run import DISTRIBUTIONS, QUICK_SIZE, SIZE
from dsa_training.work import Size, Way, weights
from linear_cross_entropy_ranks.run import NO_MULTICAST, QUIET, wait

RUNS = {1: ("131072",), 2: ("131072", "262144"), 4: ("131072", "262144", "524288:4")}
"""By number of ranks."""
CHECKED, QUICK_CHECKED = {"bfloat16": 8192, "float32": 4096}, {"bfloat16": 64, "float32": 64}
"""Tokens of the document whose gradients are compared, by dtype."""
STEPS, QUICK_RUN = 6, "64:3"
RATE = 3e-4


def main() -> None:
    """Launch every number of ranks that fits this host, print the page, and write the files that the command line asks for."""
    chosen = arguments()
    if chosen.rank:
        one_rank(chosen)
        return
    base = QUICK_SIZE if chosen.quick else SIZE
    found: dict[str, Any] = {
        **timing.about(chosen.device, *DISTRIBUTIONS),
        "size": dataclasses.asdict(base),
        "checked": QUICK_CHECKED if chosen.quick else CHECKED,
        "backend": "gloo" if chosen.device == "cpu" else "nccl",
        "ranks": {},
        "problems": [],
    }
    if chosen.device == "cuda":
        found["host"]["gpus"] = torch.cuda.device_count()
    watch = progress.Progress()
    for ranks in watch.each((f"{each} ranks", each) for each in chosen.sizes):
        launch(ranks, chosen, found)
        found["seconds"] = round(watch.seconds, 1)
        report.keep(found, chosen.json)
    report.publish(found, chosen, page.markdown)
    if found["problems"]:
        sys.exit("\n".join(found["problems"]))


def launch(ranks: int, chosen: argparse.Namespace, found: dict[str, Any]) -> None:
    """Run all ranks under torchrun and read the results of the first one, also of a launch that fails half-way."""
    with tempfile.TemporaryDirectory() as folder:
        kept, said = Path(folder, "found.json"), Path(folder, "said.txt")
        agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        runs = chosen.runs or ([QUICK_RUN] if chosen.quick else RUNS.get(ranks, RUNS[1]))
        words = ["--rank", str(kept), "--device", chosen.device, "--runs", *runs, *["--quick"] * chosen.quick]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **QUIET, **NO_MULTICAST}
        if chosen.device == "cpu":
            environment["MEGACPP_OVERLAYS_SMALL_CALLS"] = "overlay"  # they would be upstream's
        with said.open("w") as output:
            command = [*agent, str(Path(__file__).resolve()), *words]
            running = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            ended = wait(running, chosen.limit, lambda shown: shown)
        if ended:
            found["problems"].append(f"{ranks} ranks: {ended}\n{said.read_text()[-6000:]}")
        if kept.exists():
            found["ranks"][str(ranks)] = json.loads(kept.read_text())


def one_rank(chosen: argparse.Namespace) -> None:
    """Be one rank: compare gradients, then train at each length; the first rank keeps the results so far."""
    on_gpu = chosen.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    place = Place(chosen.device, dist.get_rank(), dist.get_world_size())
    if not on_gpu:
        work.answer_for_the_cpu()
    torch.backends.cuda.matmul.allow_tf32 = False
    base = QUICK_SIZE if chosen.quick else SIZE
    found: dict[str, Any] = {"gradients": {}, "runs": []}
    with work.context_parallel(place, 1):
        start = weights(base, chosen.device)
    megacpp_overlays.arm()
    for dtype, tokens in (QUICK_CHECKED if chosen.quick else CHECKED).items() if place.ranks > 1 else ():
        way = dataclasses.replace(work.OURS, dtype=getattr(torch, dtype))
        found["gradients"][dtype] = compared(dataclasses.replace(base, tokens=tokens), way, start, place)
        timing.clear(chosen.device)
        keep(found, chosen, place)
    for spec in chosen.runs:
        tokens, *steps = map(int, spec.split(":"))
        size = dataclasses.replace(base, tokens=tokens, steps=steps[0] if steps else STEPS)
        said = {"tokens": tokens, "steps": size.steps}
        try:
            found["runs"].append({**said, **work.train(size, start, place, RATE)})
        except torch.OutOfMemoryError:  # on every rank, which hold as much
            found["runs"].append({**said, "ms": None, "mib": None, "losses": []})
        timing.clear(chosen.device)
        keep(found, chosen, place)
    dist.destroy_process_group()


def compared(size: Size, way: Way, start: dict[str, torch.Tensor], place: Place) -> dict[str, Any]:
    """Return how far gradients of several ranks are from those of one, and how far rounding takes these.

    `ranks` and `rounding` have the norm of the difference over the norm, by parameter: of all ranks, and of one rank whose channels of
    hidden states are in another order, which is the same function.
    """

    def found(way: Way, ranks: int) -> dict[str, torch.Tensor]:
        return work.gradients(size, way, start, place, ranks)

    whole = found(way, 1)
    return {
        "ranks": work.apart(found(way, place.ranks), whole),
        "rounding": work.apart(found(dataclasses.replace(way, reordered=True), 1), whole),
    }


def keep(found: dict[str, Any], chosen: argparse.Namespace, place: Place) -> None:
    """Write the results so far, on the first rank."""
    if place.rank == 0:
        part = chosen.rank.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.replace(chosen.rank)  # the parent may be reading


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="A layer of DeepSeek sparse attention on context-parallel ranks.")
    parser.add_argument("--json", type=Path, help="keep every number in this file, launch by launch")
    parser.add_argument("--write", type=Path, help="keep the page in this file")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--runs", nargs="+", help="TOKENS[:STEPS], for every number of ranks")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a launch is ended")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few steps")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
