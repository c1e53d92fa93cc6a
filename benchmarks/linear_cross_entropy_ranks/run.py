"""Linear cross entropy whose vocabulary is split over the GPUs of one host: is it right, and how far is it from ideal.

    python benchmarks/linear_cross_entropy_ranks/run.py [--json FILE] [--write FILE.md] [--plot FILE.svg]
    python benchmarks/linear_cross_entropy_ranks/run.py --device cpu --quick        every line of it, with gloo, at tiny sizes

Each size of the group is a launch of its own under torchrun. Ranks hold their shard of the result against the work of
one GPU on the whole problem and against float64, and race the ways in turn, with the products of a shard, which no way
can avoid, and the collectives by themselves. linear_cross_entropy_ranks_page.py makes the page of the JSON again, on any
host.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # parts are named from the folder of all benchmarks
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import report
import timing
import torch
import torch.distributed as dist
from linear_cross_entropy.work import Shape
from linear_cross_entropy_ranks import page
from linear_cross_entropy_ranks.sections import collectives, correctness, graphs, options, times
from linear_cross_entropy_ranks.work import Place, Problem
from progress import Progress, say

SHAPE, QUICK_SHAPE = "8192x4096x131072", "40x24x96"
SECTIONS = ("correctness", "options", "times", "collectives", "graphs")
SAID = "== "
"""Begins the lines of rank 0 that are for people."""
OFTEN_S = 1.0
"""How often they are passed on."""
QUIET = {"MEGACPP_OVERLAYS_LOG": "logging", "PYTHONWARNINGS": "ignore"}
# NVLink multicast would speed up some all-reduces, but it takes hold of the fabric that all GPUs of a host share, and a
# process that dies with it can leave GPUs of others out of service. The numbers of the page are without it.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def main() -> None:
    """Launch every size that fits this host, print the page, and write the files that the command line asks for."""
    chosen = arguments()
    if chosen.rank:
        one_rank(chosen)
        return
    found = about(chosen)
    progress = Progress()
    for size in progress.each((f"TP={each}", each) for each in chosen.sizes):
        if reason := cannot(size, chosen):
            found["skipped"].append({"size": size, "reason": reason})
        else:
            launch(size, chosen, found)
        found["seconds"] = round(progress.seconds, 1)
        report.keep(found, chosen.json)
    report.publish(found, chosen, page.markdown, page.svg)
    if found["problems"]:
        sys.exit("\n".join(found["problems"]))


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="Vocabulary-parallel linear cross entropy on the GPUs of one host.")
    parser.add_argument("--json", type=Path, help="keep every number in this file, section by section")
    parser.add_argument("--write", type=Path, help="keep the page in this file")
    parser.add_argument("--plot", type=Path, help="keep the plot in this file, as SVG")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4], help="ranks of the tensor-parallel group")
    parser.add_argument("--shape", help="TOKENSxHIDDENxVOCABULARY of the whole problem")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, help="turns of each contestant")
    parser.add_argument("--limit", type=float, default=150, help="seconds after which a launch is ended")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few turns")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    chosen.shape = Shape.parse(chosen.shape or (QUICK_SHAPE if chosen.quick else SHAPE))
    chosen.rounds = chosen.rounds or (3 if chosen.quick else 10)
    return chosen


def about(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return date, host, versions and the settings of the run."""
    found = timing.about(chosen.device)
    if chosen.device != "cpu":
        found["host"]["gpus"] = torch.cuda.device_count()
        found["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        **found,
        "backend": "gloo" if chosen.device == "cpu" else "nccl",
        "shape": asdict(chosen.shape),
        "dtype": chosen.dtype,
        "rounds": chosen.rounds,
        "sizes": {},
        "skipped": [],
        "problems": [],
    }


def cannot(size: int, chosen: argparse.Namespace) -> str | None:
    """Return why this size is not measured, if so."""
    shape = chosen.shape
    if chosen.device != "cpu" and size > torch.cuda.device_count():
        return f"{size} GPUs are needed, {torch.cuda.device_count()} are here"
    if shape.vocabulary % size or shape.tokens % size:
        return f"{shape.vocabulary} classes and {shape.tokens} tokens are not divided by {size}"
    return None


def launch(size: int, chosen: argparse.Namespace, found: dict[str, Any]) -> None:
    """Run all ranks under torchrun and read the results of rank 0, also of a launch that fails half-way."""
    with tempfile.TemporaryDirectory() as folder:
        kept, said = Path(folder, "found.json"), Path(folder, "said.txt")
        agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        shape = "x".join(map(str, asdict(chosen.shape).values()))
        options = ["--shape", shape, "--device", chosen.device, "--dtype", chosen.dtype, "--rounds", str(chosen.rounds)]
        command = [*agent, str(Path(__file__).resolve()), "--rank", str(kept), *options, "--sections", *chosen.sections]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **QUIET, **NO_MULTICAST}
        with said.open("w") as output:
            running = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)

            def follow(shown: int) -> int:
                """Print the new lines of rank 0, and keep its results; return how many lines it has printed."""
                lines = [each for each in said.read_text().splitlines() if each.startswith(SAID)]
                for each in lines[shown:]:
                    say(f"   {each.removeprefix(SAID)}")
                if len(lines) > shown and kept.exists():
                    found["sizes"][str(size)] = json.loads(kept.read_text())
                    report.keep(found, chosen.json)
                return len(lines)

            ended = wait(running, chosen.limit, follow)
        if ended:
            found["problems"].append(f"TP={size}: {ended}\n{said.read_text()[-6000:]}")
        if kept.exists():
            found["sizes"][str(size)] = json.loads(kept.read_text())


def wait(running: subprocess.Popen[bytes], limit_s: float, follow: Callable[[int], int]) -> str | None:
    """Wait for the agent and follow its output; return the error, if any. On SIGTERM the agent ends its ranks."""
    deadline, shown, code = time.perf_counter() + limit_s, 0, None
    while code is None and time.perf_counter() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = running.wait(OFTEN_S)
        shown = follow(shown)
    if code is None:
        running.terminate()
        try:
            running.wait(40)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
        return f"not done after {limit_s:g} s"
    return f"exit code {code}" if code else None


def one_rank(chosen: argparse.Namespace) -> None:
    """Be one rank: measure section by section; the first keeps the results so far."""
    device = torch.device("cpu")
    if chosen.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if chosen.device == "cpu" else "nccl")
    group = dist.group.WORLD
    place = Place(group, dist.get_rank(), dist.get_world_size(), device)
    dtype = getattr(torch, chosen.dtype)
    problem, rounds = Problem.draw(chosen.shape, device, dtype), chosen.rounds
    sections: dict[str, Callable[[], Any]] = {
        "correctness": lambda: correctness(place, problem),
        "options": lambda: options(place, problem),
        "times": lambda: times(place, problem, rounds),
        "collectives": lambda: collectives(place, problem, rounds),
        "graphs": lambda: graphs(place, problem, Problem.draw(chosen.shape, device, dtype, seed=1), rounds),
    }
    found: dict[str, Any] = {}
    started = time.perf_counter()
    for number, name in enumerate(chosen.sections, start=1):
        if place.rank == 0:
            seconds = time.perf_counter() - started
            print(f"{SAID}[{number}/{len(chosen.sections)}] {name} ({seconds:.0f} s so far)", flush=True)
        found[name] = sections[name]()
        timing.clear(chosen.device)
        if place.rank == 0:
            whole = chosen.rank.with_suffix(".part")
            whole.write_text(json.dumps(found))
            whole.replace(chosen.rank)  # the parent may be reading
    if place.rank == 0:
        print(f"{SAID}done ({time.perf_counter() - started:.0f} s)", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
