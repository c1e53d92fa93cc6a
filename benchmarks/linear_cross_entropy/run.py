"""Linear cross entropy on one GPU: our kernel, its peers and the matrix products that no way can avoid, in one run.

    python benchmarks/linear_cross_entropy/run.py [--peers-at FOLDER] [--json FILE] [--write FILE.md] [--plot FILE.svg]
    python benchmarks/linear_cross_entropy/run.py --sections labelled --shape 8192x4096x131072    ignored tokens alone
    python benchmarks/linear_cross_entropy/run.py --device cpu --quick          every line of it, at sizes that say nothing

Contestants take turns, so all of them see the same clocks; times are medians of forward and backward. Extra memory is
the peak above the memory held before, less the results: losses and the two gradients. A peer that is not installed, does
not run or refuses is a row with the reason. unpack.py fills the folder of the peers (`make bench-gpu`
does all of it), page.py makes page and plot of the JSON again, on any host.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # parts are named from the folder of all benchmarks
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import os
import traceback
from dataclasses import asdict
from typing import Any

import report
import timing
import triton
from linear_cross_entropy import page
from linear_cross_entropy.peers import PEERS, load
from linear_cross_entropy.sections import Bench, accuracy, labelled, mean, none
from linear_cross_entropy.work import Shape
from progress import Progress

SHAPES = ("8192x4096x131072", "4096x2048x32000", "12288x4096x151552")
MORE_SHAPES = ("4096x4096x128256",)
QUICK_SHAPES = ("8x128x96", "12x128x64")
SECTIONS = {each.__name__: each for each in (accuracy, none, mean, labelled)}
ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Measure, print the page, and write the files that the command line asks for."""
    chosen = arguments()
    progress = Progress()
    ways, absent, versions = load(chosen.peers, chosen.peers_at.resolve(), chosen.device)
    found = {**timing.about(chosen.device), "absent": absent, "notes": [], "problems": []}
    found["versions"] |= {"triton": triton.__version__} | versions
    bench = Bench(
        device=chosen.device,
        quick=chosen.quick,
        rounds=chosen.rounds,
        burst_ms=chosen.burst,
        limit_s=chosen.limit,
        ways=ways,
        compiles="compile" in chosen.peers,
        notes=found["notes"],
    )
    steps = [(f"{name}, {shape}", (name, shape)) for shape in chosen.shape for name in chosen.sections]
    for name, shape in progress.each(steps):
        if progress.seconds > chosen.budget:
            found["notes"].append(f"{name} at {shape} was left out: {progress.seconds:.0f} s had passed")
            continue
        try:
            measured = SECTIONS[name](bench, shape)
            for table in [measured] if isinstance(measured, dict) else measured:
                found.setdefault(name, []).append({"shape": asdict(shape)} | table)
                report.keep(found, chosen.json)
        except Exception:  # noqa: BLE001 - a fault of one section must not cost the others their turn on the GPU
            found["problems"].append(f"{name}, {shape}: {traceback.format_exc()}")
        timing_clear(found, chosen.device)
        found["seconds"] = round(progress.seconds, 1)
        report.keep(found, chosen.json)
    report.publish(found, chosen, page.markdown, page.svg)
    sys.stdout.flush()
    if found["problems"]:
        print("\n".join(found["problems"]), file=sys.stderr)
    # Peers leave threads, pools and communicators behind that can keep an interpreter from ending.
    sys.stderr.flush()
    os._exit(bool(found["problems"]))


def timing_clear(found: dict[str, Any], device: str) -> None:
    """Give memory back; a broken CUDA context says so here, and the numbers so far are kept all the same."""
    try:
        timing.clear(device)
    except RuntimeError as error:
        found["problems"].append(f"the device is in no state to go on: {error}")


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="Linear cross entropy, its peers and its floor, on one GPU.")
    parser.add_argument("--json", type=Path, help="keep every number in this file, section by section")
    parser.add_argument("--write", type=Path, help="keep the page in this file")
    parser.add_argument("--plot", type=Path, help="keep the plot in this file, as SVG")
    parser.add_argument("--shape", type=Shape.parse, nargs="+", help="TOKENSxHIDDENxVOCABULARY")
    parser.add_argument("--more", action="store_true", help=f"these shapes as well: {' '.join(MORE_SHAPES)}")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument(
        "--peers-at", type=Path, default=ROOT / ".cache/peers", help="folder with PEER/site-packages in it"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each contestant")
    parser.add_argument("--burst", type=float, default=150, help="milliseconds that a turn lasts at least")
    parser.add_argument("--limit", type=float, default=9, help="seconds after which a race begins no further round")
    parser.add_argument("--budget", type=float, default=400, help="seconds after which no further section is begun")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few turns")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rounds = 2
    shapes = QUICK_SHAPES if chosen.quick else (*SHAPES, *(MORE_SHAPES if chosen.more else ()))
    chosen.shape = chosen.shape or [Shape.parse(text) for text in shapes]
    return chosen


if __name__ == "__main__":
    main()
