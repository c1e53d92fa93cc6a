"""Bottleneck of each kernel of attention over chosen keys, by the counters of the GPU: run under NVIDIA Nsight Compute.

    python benchmarks/sparse_attention/counters.py [--json FILE] [--write FILE.md]
    python benchmarks/sparse_attention/counters.py --page FILE.json [--write FILE.md]      make the page again, on any host

`ncu` must be on the PATH, and the user allowed to read counters. Clocks are left as they are, and a kernel has the GPU to itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # parts are named from the folder of all benchmarks
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import csv
import json
import math
import re
import shutil
import subprocess
from typing import Any

import progress
import report
import timing

SHAPES = ("4096x4096x128x576x512", "4096x4096x128x320x256", "4096x4096x128x192x128")
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "LaunchStats", "Occupancy")
KERNELS = ("attend_rows", "score_side", "add_keys", "query_side", "slot_side", "sum_slots")
METRICS = {
    "Duration": "ns",
    "SM Frequency": "hz",
    "L1/TEX Cache Throughput": "l1",
    "L2 Cache Throughput": "l2",
    "DRAM Throughput": "dram",
    "Issue Slots Busy": "issue",
    "Achieved Active Warps Per SM": "warps",
    "Registers Per Thread": "registers",
    "Grid Size": "programs",
}
"""Of ncu, by the names that they are kept under."""
_BUSIEST = re.compile(r"(\w+) is the highest-utilized pipeline \((\d+\.\d+)%\)")
FORWARD = "attend_rows"
"""The kernel of which it is sampled where the warps that take the softmax spend their time."""
_SCORES, _WAITED, _HANDED_ON = "HGMMA.64x64x16", "WARPGROUP.DEPBAR", "SYNCS.ARRIVE"
"""Instructions of its machine code: the product of queries and keys, the wait for it, and the sign that weights are there."""
TENSOR = ("Tensor", "Shared")
"""The tensor cores, and the pipe that they share with 64-bit arithmetic, which these kernels have none of."""
SLOTS = 2048
"""Chosen keys of a shape that does not say how many."""
_SHARES = {
    "keys": "of them until keys are there,",
    "product": "in the product of queries and keys,",
    "softmax": "in the softmax.",
}
OPERATIONS_OF_A_CYCLE = 4096
"""Of bfloat16 on the tensor cores of one multiprocessor of Hopper, multiplications and additions: 989 TFLOP/s at 1.83 GHz."""


def main() -> None:
    """Count, print the page, and keep what is asked for."""
    chosen = arguments()
    if chosen.work:
        run_once(chosen.work)
        return
    if chosen.page:
        report.publish(json.loads(chosen.page.read_text()), chosen, markdown)
        return
    if shutil.which("ncu") is None:
        sys.exit("there is no ncu on the PATH: install NVIDIA Nsight Compute, which comes with the CUDA toolkit")
    found: dict[str, Any] = {**timing.about("cuda", "triton"), "shapes": [], "problems": []}
    found["multiprocessors"] = multiprocessors()
    watch = progress.Progress()
    for shape in watch.each([(each, each) for each in chosen.shape]):
        found["shapes"].append({"shape": shape, "kernels": counted(shape), "samples": sampled(shape)})
        found["seconds"] = round(watch.seconds, 1)
        report.keep(found, chosen.json)
    report.publish(found, chosen, markdown)


def multiprocessors() -> int:
    """Return how many the GPU has."""
    import torch

    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def run_once(text: str) -> None:
    """Attend once, forward and backward."""
    import torch
    from sparse_attention import work

    each = work.problem(work.Shape.parse(text), "cuda")
    output = work.ours(each)
    torch.autograd.grad(output, (each.query, each.key), each.above)
    torch.cuda.synchronize()


def counted(shape: str) -> dict[str, Any]:
    """Return the counters of the first launch of each kernel that such a shape has."""
    words = [word for section in SECTIONS for word in ("--section", section)]
    return read(_ncu(shape, "details", *words, "--kernel-name", f"regex:{'|'.join(KERNELS)}", "--launch-count", "6"))


def sampled(shape: str) -> dict[str, float] | None:
    """Return the shares of the time of the warps that take the softmax of a forward pass; None where that kernel has no such warps."""
    words = ("--section", "SourceCounters", "--kernel-name", f"regex:{FORWARD}", "--launch-count", "1")
    return shares(_ncu(shape, "source", *words))


def _ncu(shape: str, page: str, *words: str) -> str:
    """Return what ncu prints of a shape on one of its pages."""
    command = ["ncu", "--clock-control", "none", "--csv", "--page", page, *words]
    command += [sys.executable, "-W", "ignore", __file__, "--work", shape]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"ncu ended with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def shares(printed: str) -> dict[str, float] | None:
    """Return shares of samples in the loop over tiles: until keys are there, product of queries and keys, softmax.

    Args:
        printed: machine code with samples, as ncu prints it.
    """
    lines = printed[printed.index('"Address"') :].splitlines()
    rows = [(each["Source"], int(each["# Samples"] or 0)) for each in csv.DictReader(lines)]
    code = [text for text, _ in rows]
    products = [place for place, text in enumerate(code) if _SCORES in text]
    if not products:
        return None
    first, last = products[0], products[-1]
    begin = max(place for place in range(first) if "SYNCS.PHASECHK" in code[place])
    waited = _next(code, last, _WAITED)
    end = _next(code, _next(code, waited, _HANDED_ON), "BRA")
    parts = {"keys": (begin, first), "product": (first, waited + 1), "softmax": (waited + 1, end + 1)}
    counts = {name: sum(samples for _, samples in rows[start:stop]) for name, (start, stop) in parts.items()}
    return {name: count / sum(counts.values()) for name, count in counts.items()}


def _next(code: list[str], start: int, word: str) -> int:
    return next(place for place in range(start + 1, len(code)) if word in code[place])


def read(printed: str) -> dict[str, Any]:
    """Return the counters in what ncu printed, by kernel; of its first launch."""
    lines = printed[printed.index('"ID"') :].splitlines()
    found: dict[str, dict[str, Any]] = {}
    launches: dict[str, str] = {}
    for row in csv.DictReader(lines):
        kernel = row["Kernel Name"]
        if launches.setdefault(kernel, row["ID"]) != row["ID"]:
            continue
        one = found.setdefault(kernel, {})
        if name := METRICS.get(row["Metric Name"]):
            one[name] = float(row["Metric Value"].replace(",", ""))
        elif busiest := _BUSIEST.search(row.get("Rule Description") or ""):
            one["pipe"], one["pipe_busy"] = busiest[1], float(busiest[2])
    return found


def markdown(found: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "Written by `benchmarks/sparse_attention/counters.py`: NVIDIA Nsight Compute's counters of the first launch of each kernel, alone on",
        "the GPU at the clocks that it takes. Shapes are queries x keys x heads x channels x value channels, 2048 keys chosen; the",
        "kernels of a backward pass are launched for a part of the queries at a time. Percentages are of the most that a unit can do. A TFLOP/s is",
        "what the tensor cores do while a kernel runs, by how busy they are, at its clock; `Shared` is their pipe and that of 64-bit arithmetic, which",
        "is not there.",
    ]
    for each in found["shapes"]:
        lines += ["", f"## {each['shape']}", ""]
        head = ("kernel", "ms", "GHz", "busiest pipe", "TFLOP/s", "L1 and shared memory", "L2", "memory")
        head += ("issue slots", "warps a multiprocessor", "registers")
        rows = [row(name, one, found["multiprocessors"]) for name, one in each["kernels"].items()]
        lines += report.table(head, rows)
        if each.get("samples"):
            lines += ["", said_of_samples(each, found["multiprocessors"])]
    return report.whole("What holds attention over chosen keys back", found, lines)


def said_of_samples(each: dict[str, Any], multiprocessors: int) -> str:
    """Return where the warps that take the softmax spend the cycles of a tile of 64 heads and 64 slots, in a sentence."""
    queries, _, heads, _, _, *chosen = map(int, each["shape"].split("x"))
    one = each["kernels"][FORWARD]
    tiles = queries * math.ceil(heads / 64) * (chosen[0] if chosen else SLOTS) / 64
    cycles = one["ns"] / 1e9 * one["hz"] * multiprocessors / tiles
    shares_of = " ".join(f"{each['samples'][name]:.0%} {words}" for name, words in _SHARES.items())
    return f"In `{FORWARD}` a tile of 64 heads and 64 slots takes {cycles:,.0f} cycles of a multiprocessor. The warps that take the softmax spend {shares_of}"


def row(name: str, one: dict[str, Any], multiprocessors: int) -> list[str]:
    """Return a line of a table."""
    rate = None
    if one.get("pipe") in TENSOR:
        rate = one["pipe_busy"] / 100 * OPERATIONS_OF_A_CYCLE * multiprocessors * one["hz"] / 1e12
    return [
        name,
        report.ms(one["ns"] / 1e6),
        f"{one['hz'] / 1e9:.2f}",
        f"{one['pipe']}, {one['pipe_busy']:.0f}%" if "pipe" in one else "-",
        report.number(rate, ".0f"),
        *(f"{one[unit]:.0f}%" for unit in ("l1", "l2", "dram", "issue")),
        f"{one['warps']:.0f}",
        f"{one['registers']:.0f}",
    ]


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="Counters of the kernels of attention over chosen keys, on a GPU.")
    parser.add_argument("--json", type=Path, help="keep every number in this file, shape by shape")
    parser.add_argument("--write", type=Path, help="keep the page in this file")
    parser.add_argument("--page", type=Path, help="make the page of this file; count nothing")
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="QUERIESxKEYSxHEADSxDIMxVALUE, or with xSLOTS")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
