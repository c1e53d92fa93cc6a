"""Prove claim by claim, on a CPU, the effects of overlays on third-party launchers and tests; `make proof-cpu` runs it.

    .envs/proof/bin/python proof/run.py --json FILE --write FILE.md --plot FILE.svg
    .envs/proof/bin/python proof/run.py --page FILE.json --write FILE.md --plot FILE.svg     make the page again
    .envs/proof/bin/python proof/run.py --megatron-lm CHECKOUT --json FILE --write FILE.md   Megatron-LM's launcher instead
    .envs/bridge/bin/python proof/run.py --bridge --json FILE --write FILE.md                megatron-bridge's instead

    python proof/run.py --gpu --json FILE --write FILE.md    the Trainer alone, with a model of real size on a GPU

In parts, which may be cut off, and one page of them:

    python proof/run.py --megatron-lm CHECKOUT --only megatron-graphs --json graphs.json     and so on
    python proof/run.py --page graphs.json --page launches.json --json FILE --write FILE.md

Each claim HOLDS or FAILS, or is UPSTREAM: something fails in the same way without overlays. The exit code is 1 when a claim
fails, 2 on wrong usage.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # pages are drawn as those of the benchmarks are
    sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import argparse
import hashlib
import importlib.metadata
import json
import platform
import resource
import time
from datetime import datetime, timezone

import megatron_plot
import page
import plot
import proofs
import report
import timing
from claims import Found
from parts import PartsError, joined
from proofs import Proof
from runner import exit_code, prove, summary

ROOT = Path(__file__).resolve().parents[1]
ARCHIVES = ROOT / ".cache/proof"


def main() -> int:
    """Run the proof and write the files that the command line names; return the exit code."""
    chosen = parse_arguments()
    if chosen.page:
        try:
            found = joined([json.loads(each.read_text()) for each in chosen.page], [each.name for each in chosen.page])
        except PartsError as error:
            print(error, file=sys.stderr)
            return 2
    else:
        found = measured(chosen)
        took = f"{found['seconds']:.0f} s, of which its processes computed for {found['cpu_seconds']:.0f} s"
        print(f"\n{summary(found['claims'])}\n{took}", flush=True)
    report.keep(found, chosen.json)
    draw = megatron_plot.svg if "megatron" in found["measured"] else plot.svg
    for path, make in ((chosen.write, page.markdown), (chosen.plot, draw)):
        if path:
            path.write_text(make(found))
    return exit_code(found["claims"])


def measured(chosen: argparse.Namespace) -> Found:
    """Return the results of the proof, with its host, versions and inputs."""
    began = time.monotonic()
    proof = asked_for(chosen)
    head: Found = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "host": host(on_gpus=proof.on_gpus),
        "versions": {name: importlib.metadata.version(name) for name in proof.needed},
        "inputs": {name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name in proof.inputs},
        "quick": chosen.quick,
    }
    subjects = [each for each in proof.subjects if not chosen.only or each.id in chosen.only]

    def with_head(found: Found) -> Found:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = {"seconds": time.monotonic() - began, "cpu_seconds": children.ru_utime + children.ru_stime}
        return {**head, **found, **spent}

    found = prove(
        subjects,
        chosen.archives,
        lambda text: print(text, flush=True),
        quick=chosen.quick,
        on_gpu=chosen.gpu,
        checkout=chosen.megatron_lm,
        ranks=chosen.ranks,
        keep=lambda found: report.keep(with_head(found), chosen.json),
    )
    return with_head(found)


def asked_for(chosen: argparse.Namespace) -> Proof:
    """Return the proof that the options ask for."""
    if chosen.bridge:
        return proofs.WITH_BRIDGE
    if chosen.megatron_lm:
        return proofs.WITH_A_CHECKOUT
    return proofs.ON_A_GPU if chosen.gpu else proofs.ON_A_CPU


def host(*, on_gpus: bool) -> Found:
    """Return the host; with its GPU only where the GPU computes."""
    if on_gpus and has_gpu():
        found: Found = timing.about("cuda")["host"]
        return found
    return {"machine": platform.machine(), "python": platform.python_version()}


def has_gpu() -> bool:
    """Whether torch finds a GPU."""
    import torch

    return bool(torch.cuda.is_available())


def parse_arguments() -> argparse.Namespace:
    """Read the command line, and refuse options that would only fail later."""
    parser = argparse.ArgumentParser(description="Prove claim by claim the effects of overlays, on a CPU.")
    parser.add_argument(
        "--page",
        type=Path,
        action="append",
        help="make page and plot of these receipts; measure nothing; several are put together as parts of one proof",
    )
    parser.add_argument("--json", type=Path, help="keep the receipts in this file")
    parser.add_argument("--write", type=Path, help="keep the page in this file")
    parser.add_argument("--plot", type=Path, help="keep the plot in this file, as SVG")
    parser.add_argument(
        "--only",
        action="append",
        choices=list(dict.fromkeys(subject.id for proof in proofs.ALL for subject in proof.subjects)),
        help="one subject; may be repeated",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--bridge", action="store_true", help="prove the claims about megatron-bridge's pretrain function instead"
    )
    instead.add_argument(
        "--megatron-lm",
        type=Path,
        metavar="CHECKOUT",
        help="prove the claims about Megatron-LM's launcher instead, with this checkout; nothing is written into it",
    )
    instead.add_argument(
        "--gpu", action="store_true", help="the Trainer on the first GPU instead, with a model of real size"
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps and fewer of upstream's tests")
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="run Megatron-LM's own unit tests in worlds of N ranks, a GPU each (1 unless said)",
    )
    parser.add_argument("--archives", type=Path, default=ARCHIVES, help="folder of the source archives of upstreams")
    chosen = parser.parse_args()
    proof = asked_for(chosen)
    names = [subject.id for subject in proof.subjects]
    if unknown := [each for each in chosen.only or () if each not in names]:
        parser.error(f"--only {unknown[0]}: {proof.asked} there are {', '.join(names)}")
    for path in filter(None, (chosen.json, chosen.write, chosen.plot)):
        if not path.resolve().parent.is_dir():
            parser.error(
                f"there is no folder {path.resolve().parent} to write {path.name} into: make it, or name another"
            )
    if chosen.page:
        for path in chosen.page:
            if not path.is_file():
                parser.error(f"there are no receipts {path}: `make proof-cpu` leaves proof/results/cpu.json")
    elif missing := [name for name in proof.needed if not is_installed(name)]:
        parser.error(
            f"{sys.executable} has no {', '.join(missing)}: `make {proof.command}` sets up .envs/{proof.lane}, "
            "whose interpreter has everything"
        )
    elif chosen.gpu and not has_gpu():
        parser.error("--gpu: torch finds none here; `make proof-cpu` does the same with a small model")
    return chosen


def is_installed(name: str) -> bool:
    """Whether this interpreter has a distribution."""
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
