"""Profile the kernels of attention over chosen keys under NVIDIA Nsight Compute: GPU counters and the bottleneck of each kernel.

    python benchmarks/sparse_attention/counters.py [--json FILE] [--write FILE.md]
    python benchmarks/sparse_attention/counters.py --page FILE.json [--write FILE.md]      make the page again, on any host

`ncu` must be on the PATH, and the user allowed to read counters. Clocks are not locked, and kernels run one at a time.
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
"""Metrics of ncu, each with its key in the results."""
_BUSIEST = re.compile(r"(\w+) is the highest-utilized pipeline \((\d+\.\d+)%\)")
FORWARD = "attend_rows"
"""The kernel whose softmax warps are sampled."""
_SCORES, _WAITED, _HANDED_ON = "HGMMA.64x64x16", "WARPGROUP.DEPBAR", "SYNCS.ARRIVE"
"""Machine instructions of its softmax warps: the product of queries and keys, the wait for it, and the signal that weights are ready."""
TENSOR = ("Tensor", "Shared")
"""Pipelines of the tensor cores. `Shared` also runs 64-bit arithmetic, which these kernels do not use."""
SLOTS = 2048
"""Chosen keys for each query, where a shape has no number of them."""
_SHARES = {
    "keys": "of them until keys are there,",
    "product": "in the product of queries and keys,",
    "softmax": "in the softmax.",
}
OPERATIONS_OF_A_CYCLE = 4096
"""bfloat16 multiplications and additions in a clock cycle of one Hopper multiprocessor: 989 TFLOP/s at 1.83 GHz."""


def main() -> None:
    """Collect the counters, print the page, and write the files that were asked for."""
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
        found["shapes"].append({"shape": shape, "kernels": collect_counters(shape), "samples": sample_softmax(shape)})
        found["seconds"] = round(watch.seconds, 1)
        report.keep(found, chosen.json)
    report.publish(found, chosen, markdown)


def multiprocessors() -> int:
    """Return the number of multiprocessors of the GPU."""
    import torch

    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def run_once(text: str) -> None:
    """Run one forward and one backward pass, in the process that ncu profiles."""
    import torch
    from sparse_attention import work

    each = work.problem(work.Shape.parse(text), "cuda")
    output = work.ours(each)
    torch.autograd.grad(output, (each.query, each.key), each.above)
    torch.cuda.synchronize()


def collect_counters(shape: str) -> dict[str, Any]:
    """Return the counters of the first launch of each kernel."""
    words = [word for section in SECTIONS for word in ("--section", section)]
    return read(_ncu(shape, "details", *words, "--kernel-name", f"regex:{'|'.join(KERNELS)}", "--launch-count", "6"))


def sample_softmax(shape: str) -> dict[str, float] | None:
    """Return the shares of time of the softmax warps in a forward pass; None for a kernel without such warps."""
    words = ("--section", "SourceCounters", "--kernel-name", f"regex:{FORWARD}", "--launch-count", "1")
    return shares(_ncu(shape, "source", *words))


def _ncu(shape: str, page: str, *words: str) -> str:
    """Profile a shape; return one page of ncu as CSV."""
    command = ["ncu", "--clock-control", "none", "--csv", "--page", page, *words]
    command += [sys.executable, "-W", "ignore", __file__, "--work", shape]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"ncu ended with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def shares(printed: str) -> dict[str, float] | None:
    """Return shares of samples in the loop over tiles: wait for keys, product of queries and keys, softmax.

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
    """Parse the CSV of ncu; return the counters of the first launch of each kernel."""
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
    """Return the page of results."""
    lines = [
        "Written by `benchmarks/sparse_attention/counters.py`: NVIDIA Nsight Compute's counters of the first launch of each kernel, alone on",
        "the GPU, with clocks that are not locked. Shapes are queries x keys x heads x channels x value channels, 2048 keys chosen; a backward",
        "pass launches its kernels for a part of the queries at a time. Percentages are of the peak of a unit. TFLOP/s are the peak of the tensor",
        "cores at the clock of the kernel, times their utilization. The pipe `Shared` has tensor cores and 64-bit arithmetic, which no kernel uses.",
    ]
    for each in found["shapes"]:
        lines += ["", f"## {each['shape']}", ""]
        head = ("kernel", "ms", "GHz", "busiest pipe", "TFLOP/s", "L1 and shared memory", "L2", "memory")
        head += ("issue slots", "warps a multiprocessor", "registers")
        rows = [row(name, one, found["multiprocessors"]) for name, one in each["kernels"].items()]
        lines += report.table(head, rows)
        if each.get("samples"):
            lines += ["", said_of_samples(each, found["multiprocessors"])]
    return report.whole("Bottlenecks of attention over chosen keys", found, lines)


def said_of_samples(each: dict[str, Any], multiprocessors: int) -> str:
    """Return a sentence: the cycles of a tile of 64 heads and 64 slots, and how the softmax warps spend them."""
    queries, _, heads, _, _, *chosen = map(int, each["shape"].split("x"))
    one = each["kernels"][FORWARD]
    tiles = queries * math.ceil(heads / 64) * (chosen[0] if chosen else SLOTS) / 64
    cycles = one["ns"] / 1e9 * one["hz"] * multiprocessors / tiles
    parts = " ".join(f"{each['samples'][name]:.0%} {words}" for name, words in _SHARES.items())
    return f"In `{FORWARD}` a tile of 64 heads and 64 slots takes {cycles:,.0f} cycles of a multiprocessor. The warps that take the softmax spend {parts}"


def row(name: str, one: dict[str, Any], multiprocessors: int) -> list[str]:
    """Return the row of a kernel in a table."""
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
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Counters of the kernels of attention over chosen keys, on a GPU.")
    parser.add_argument("--json", type=Path, help="keep every number in this file, shape by shape")
    parser.add_argument("--write", type=Path, help="keep the page in this file")
    parser.add_argument("--page", type=Path, help="make the page of this file; count nothing")
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="QUERIESxKEYSxHEADSxDIMxVALUE, or with xSLOTS")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
