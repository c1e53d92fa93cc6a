"""Prove claim by claim, on a CPU, what overlays do to launchers and tests of others; `make proof-cpu` runs it.

    .envs/proof/bin/python proof/run.py --json FILE --write FILE.md --plot FILE.svg
    .envs/proof/bin/python proof/run.py --page FILE.json --write FILE.md --plot FILE.svg     make the page again
    .envs/proof/bin/python proof/run.py --megatron-lm CHECKOUT --json FILE --write FILE.md   Megatron-LM's launcher instead
    .envs/bridge/bin/python proof/run.py --bridge --json FILE --write FILE.md                megatron-bridge's instead

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

import bridge_claims
import bridge_launches
import liger_tests_claims
import liger_tests_runs
import megatron_claims
import megatron_launches
import megatron_tests
import page
import plot
import report
import timing
import trainer_claims
import trainer_launches
from claims import Found, Subject
from runner import exit_code, prove, summary

ROOT = Path(__file__).resolve().parents[1]
SUBJECTS = (
    Subject(
        "trainer",
        "the Trainer of transformers, with Liger's loss of each token",
        trainer_launches.measure,
        trainer_claims.CLAIMS,
    ),
    Subject("liger-tests", "Liger's own tests of this loss", liger_tests_runs.measure, liger_tests_claims.CLAIMS),
)
OF_A_CHECKOUT = (
    Subject(
        "megatron",
        "Megatron-LM's own launcher, DeepSeek sparse attention and experts",
        megatron_launches.measure,
        megatron_claims.CLAIMS,
    ),
    Subject(
        "megatron-tests", "Megatron-LM's own tests of sparse attention", megatron_tests.measure, megatron_tests.CLAIMS
    ),
)
OF_BRIDGE = (
    Subject(
        "bridge",
        "the pretrain function of megatron-bridge, DeepSeek sparse attention and experts",
        bridge_launches.measure,
        bridge_claims.CLAIMS,
    ),
)
NEEDED = ("torch", "triton", "numpy", "transformers", "accelerate", "liger-kernel", "pytest", "megacpp-overlays")
MEGATRON_NEEDED = ("torch", "triton", "numpy", "psutil", "pytest", "megacpp-overlays")
BRIDGE_NEEDED = (
    *("torch", "triton", "numpy", "transformers", "megatron-core", "megatron-bridge", "nvidia-modelopt"),
    "megacpp-overlays",
)
INPUTS = ("locks/proof.txt", "locks/proof-source.txt", "proof/launchers/hf_trainer.py")
"""What decides everything that is measured; their hashes are on the page."""
MEGATRON_INPUTS = ("locks/proof.txt", "proof/launchers/local_stack.py", "proof/on_cpu/sitecustomize.py")
BRIDGE_INPUTS = (
    *("locks/bridge.txt", "locks/bridge-source.txt", "proof/launchers/bridge_pretrain.py"),
    *("proof/launchers/bridge_stand_ins.py", "proof/launchers/local_stack.py", "proof/on_cpu/sitecustomize.py"),
)
ARCHIVES = ROOT / ".cache/proof"


def main() -> int:
    """Prove what is asked for, write what is asked for, and return the exit code."""
    chosen = parse_arguments()
    if chosen.page:
        found = json.loads(chosen.page.read_text())
    else:
        found = measured(chosen)
        took = f"{found['seconds']:.0f} s, of which its processes computed for {found['cpu_seconds']:.0f} s"
        print(f"\n{summary(found['claims'])}\n{took}", flush=True)
    report.keep(found, chosen.json)
    for path, make in ((chosen.write, page.markdown), (chosen.plot, plot.svg)):
        if path:
            path.write_text(make(found))
    return exit_code(found["claims"])


def measured(chosen: argparse.Namespace) -> Found:
    """Return what was proved, with the host, versions and inputs that it was proved with."""
    began = time.monotonic()
    checkout: Path | None = chosen.megatron_lm
    head: Found = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "host": host(on_gpus=checkout is not None),
        "versions": {name: importlib.metadata.version(name) for name in needed(checkout, bridge=chosen.bridge)},
        "inputs": {
            name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest()
            for name in (BRIDGE_INPUTS if chosen.bridge else MEGATRON_INPUTS if checkout else INPUTS)
        },
        "quick": chosen.quick,
    }
    subjects = [each for each in offered_with(chosen) if not chosen.only or each.id in chosen.only]
    found = prove(
        subjects, chosen.archives, lambda text: print(text, flush=True), quick=chosen.quick, checkout=checkout
    )
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = {"seconds": time.monotonic() - began, "cpu_seconds": children.ru_utime + children.ru_stime}
    return {**head, **found, **spent}


def host(*, on_gpus: bool) -> Found:
    """Return what is measured on; the GPU only where it is asked to compute."""
    if on_gpus:
        import torch

        if torch.cuda.is_available():
            found: Found = timing.about("cuda")["host"]
            return found
    return {"machine": platform.machine(), "python": platform.python_version()}


def offered_with(chosen: argparse.Namespace) -> tuple[Subject, ...]:
    """Return the subjects of a proof."""
    if chosen.bridge:
        return OF_BRIDGE
    return OF_A_CHECKOUT if chosen.megatron_lm else SUBJECTS


def needed(checkout: Path | None, *, bridge: bool = False) -> tuple[str, ...]:
    """Return the distributions without which nothing can be measured."""
    if bridge:
        return BRIDGE_NEEDED
    return MEGATRON_NEEDED if checkout else NEEDED


def parse_arguments() -> argparse.Namespace:
    """Read the command line, and refuse what would only fail later."""
    parser = argparse.ArgumentParser(description="Prove claim by claim what overlays do, on a CPU.")
    parser.add_argument("--page", type=Path, help="make page and plot of these receipts; measure nothing")
    parser.add_argument("--json", type=Path, help="keep the receipts in this file")
    parser.add_argument("--write", type=Path, help="keep the page in this file")
    parser.add_argument("--plot", type=Path, help="keep the plot in this file, as SVG")
    parser.add_argument(
        "--only",
        action="append",
        choices=[subject.id for subject in (*SUBJECTS, *OF_A_CHECKOUT, *OF_BRIDGE)],
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
    parser.add_argument("--quick", action="store_true", help="fewer steps and fewer of upstream's tests")
    parser.add_argument("--archives", type=Path, default=ARCHIVES, help="folder of the source archives of upstreams")
    chosen = parser.parse_args()
    offered = [subject.id for subject in offered_with(chosen)]
    if unknown := [each for each in chosen.only or () if each not in offered]:
        with_it = "with --bridge" if chosen.bridge else f"with{'' if chosen.megatron_lm else 'out'} --megatron-lm"
        parser.error(f"--only {unknown[0]}: {with_it} there are {', '.join(offered)}")
    for path in filter(None, (chosen.json, chosen.write, chosen.plot)):
        if not path.resolve().parent.is_dir():
            parser.error(
                f"there is no folder {path.resolve().parent} to write {path.name} into: make it, or name another"
            )
    if chosen.page:
        if not chosen.page.is_file():
            parser.error(f"there are no receipts {chosen.page}: `make proof-cpu` leaves proof/results/cpu.json")
    elif missing := [name for name in needed(chosen.megatron_lm, bridge=chosen.bridge) if not is_installed(name)]:
        command, lane = ("proof-bridge", "bridge") if chosen.bridge else ("proof-cpu", "proof")
        parser.error(
            f"{sys.executable} has no {', '.join(missing)}: `make {command}` sets up .envs/{lane}, "
            "whose interpreter has everything"
        )
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
