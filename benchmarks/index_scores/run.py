"""Index scores of DSA before and after: Megatron's einsum and the kernels, in one run on one GPU.

    python benchmarks/index_scores/run.py [--json FILE] [--write FILE.md] [--plot FILE.svg]
    python benchmarks/index_scores/run.py --device cpu --quick          every line of it, at sizes that say nothing

`before` is the installed Megatron-Core as it is: its module is loaded a second time, from its file, where no overlay
sees it. `after` is the same module with the overlay active. Contestants take turns, so all of them see the same clocks;
times are medians. Memory is the peak above the memory held before the call, results included. A contestant that does not
fit into the GPU's memory is reported, not skipped. page.py makes page and plot of the JSON again, on any host.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # parts are named from the folder of all benchmarks
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import importlib
import importlib.util
import inspect
import time
import traceback
from dataclasses import asdict
from types import ModuleType

import megacpp_overlays  # before torch and Megatron

# isort: split
import report
import timing
import torch
from index_scores import page
from index_scores.sections import autograd, forward, largest, manual, step
from index_scores.work import Bench, Shape, copy_of

from megacpp_overlays.source import distributions

OVERLAY = "dsa-indexer-streaming"
MEGATRON = "megatron.core.transformer.experimental_attention_variant.dsa"
BACKWARD = "bwd_fused_indexer_loss_naive"
DISTRIBUTIONS = ("triton", "megatron-core")
SHAPES = ("4096x4096x8x32x128", "8192x8192x1x64x128")
QUICK_SHAPES = ("64x96x2x4x64", "128x128x1x3x80")
SECTIONS = {each.__name__: each for each in (forward, autograd, manual, step, largest)}


def main() -> None:
    """Measure, print the page, and write the files that the command line asks for."""
    chosen = arguments()
    torch.manual_seed(0)
    before, after = megatron()
    bench = Bench(
        device=chosen.device,
        quick=chosen.quick,
        rounds=chosen.rounds,
        limit_s=chosen.limit,
        topk=chosen.topk,
        main_heads=tuple(chosen.main_heads),
        main_dim=chosen.main_dim,
        largest_batch=chosen.largest_batch,
        before=before,
        after=after,
        found={**timing.about(chosen.device), "problems": [], "notes": []},
    )
    bench.found["versions"] |= {name: distributions.version(name) or "not installed" for name in DISTRIBUTIONS}
    started = time.perf_counter()
    for name in chosen.sections:
        section = SECTIONS[name]
        bench.found[name] = []
        for shape in chosen.shape[:1] if section in {step, largest} else chosen.shape:
            print(f"== {time.perf_counter() - started:.0f} s: {name}, {shape}", file=sys.stderr, flush=True)
            try:
                bench.found[name].append({"shape": asdict(shape)} | section(bench, shape))
            except Exception:  # noqa: BLE001 - a fault of one section must not cost the others their turn on the GPU
                bench.found["problems"].append(f"{name}, {shape}: {traceback.format_exc()}")
            timing.clear(chosen.device)
            bench.found["seconds"] = round(time.perf_counter() - started, 1)
            report.keep(bench.found, chosen.json)
    report.publish(bench.found, chosen, page.markdown, page.svg)
    if bench.found["problems"]:
        sys.exit("\n".join(bench.found["problems"]))


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="Index scores of DSA before and after, on a GPU.")
    parser.add_argument("--json", type=Path, help="keep every number in this file, section by section")
    parser.add_argument("--write", type=Path, help="keep the page in this file")
    parser.add_argument("--plot", type=Path, help="keep the plot in this file, as SVG")
    parser.add_argument(
        "--shape", type=Shape.parse, nargs="+", help="QUERIESxKEYSxBATCHxHEADSxDIM; step and largest take the first"
    )
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each contestant")
    parser.add_argument(
        "--limit", type=float, default=12, help="seconds after which a race or a search goes no further"
    )
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument(
        "--main-heads",
        type=int,
        nargs="+",
        default=[1, 16],
        help="of the main attention; step and largest take the last",
    )
    parser.add_argument("--main-dim", type=int, default=128)
    parser.add_argument("--largest-batch", type=int, default=256, help="where the search for the largest one ends")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few turns")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.topk, chosen.main_heads, chosen.main_dim, chosen.largest_batch = 3, 32, [1, 2], 16, 5
    chosen.shape = chosen.shape or [Shape.parse(text) for text in (QUICK_SHAPES if chosen.quick else SHAPES)]
    return chosen


def megatron() -> tuple[ModuleType, ModuleType]:
    """Return Megatron's module as it is, and the same with the overlay active.

    Raises:
        SystemExit: there is nothing to compare.
    """
    if importlib.util.find_spec("megatron") is None:
        sys.exit("There is no Megatron-Core here to compare with: install megatron-core 0.19 or newer.")
    module = importlib.import_module(MEGATRON)
    as_it_is = copy_of(module)
    if "mask" not in inspect.signature(getattr(as_it_is, BACKWARD, lambda: None)).parameters:
        sys.exit(f"{BACKWARD} of this Megatron-Core takes no mask: install megatron-core 0.19 or newer.")
    records = [record for record in megacpp_overlays.audit().records if record.overlay.id == OVERLAY]
    if [record.decision.value for record in records] != ["active"]:
        sys.exit(f"{OVERLAY} is not active: {'; '.join(f'{each.decision.value}, {each.reason}' for each in records)}")
    return as_it_is, module


if __name__ == "__main__":
    main()
