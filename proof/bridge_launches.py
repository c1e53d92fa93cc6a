"""The pretrain function of megatron-bridge, launched in several ways: the launches, and their logs."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from claims import Found, Say, Workplace
from megatron_launcher import LOGGED, TORCHRUN, decided, steps
from megatron_launches import BOTH, RANKS, Launch, Layout, Way
from megatron_sizes import EVERYWHERE, STAND_INS
from processes import ON_CPU, RUN, ProofError, start
from upstream_tests import LAUNCHERS

LAUNCHER = LAUNCHERS / "bridge_pretrain.py"
STEPS, QUICK_STEPS = 20, 6
LAUNCHES = (
    *(Launch(way) for way in (Way.STOCK, Way.OVERLAYS, Way.AGAIN, Way.OFF)),
    *(Launch(way, layout) for layout in (Layout.DATA, Layout.TENSOR) for way in BOTH),
)
TAKES = f"{len(LAUNCHES)} launches"
WORDS = {Layout.ONE: (), Layout.DATA: ("--distributed-optimizer",), Layout.TENSOR: ("--tensor-parallel", "2")}
ENV = {
    **ON_CPU,
    **EVERYWHERE,
    "TRITON_INTERPRET": "0",  # where it is off, kernels of this project for CPU tensors are PyTorch in blocks
    "TORCHDYNAMO_DISABLE": "1",
    # megatron-bridge runs `make` where Megatron's wheel has no Makefile; the wheel has the files that it would make.
    "MAKEFLAGS": "--eval=made:;",
}


def measure(place: Workplace, say: Say) -> Found:
    """Return the log of each launch, and its decisions."""
    count = QUICK_STEPS if place.quick else STEPS
    runs = {}
    for number, launch in enumerate(LAUNCHES, start=1):
        began = time.monotonic()
        runs[launch.name] = run = launched(launch, count, place.folder)
        took = time.monotonic() - began
        end = f"loss {run['losses'][0]:.3f} to {run['losses'][-1]:.3f}"
        say(f"[{number}/{len(LAUNCHES)}] megatron-bridge: {launch.name}: {end}, {took:.0f} s")
    return {"steps": count, "runs": runs}


def launched(launch: Launch, count: int, folder: Path) -> Found:
    """Run the launcher once and return its log."""
    stem = re.sub(r"\W+", "-", launch.name)
    audit = folder / f"{stem}.audit.json"
    ours = launch.way in {Way.OVERLAYS, Way.OFF}
    words: list[str | Path] = [*RUN, "--audit", audit, "--verify-ranks"] if ours else []
    # The last rank logs steps and the first one speeds, unbuffered: in one stream their lines would run together.
    logs = folder / f"{stem}.logs"
    words += [*TORCHRUN, str(RANKS[launch.layout]), "--log-dir", logs, "--redirects", "1", LAUNCHER]
    words += ["--backend", "gloo", "--steps", str(count), *WORDS[launch.layout]]
    env = {**ENV, **({"MEGACPP_OVERLAYS": "off"} if launch.way is Way.OFF else {})}
    start(words, env, path=[STAND_INS, LAUNCHERS], cwd=folder)
    streams = sorted(logs.glob(f"*/attempt_0/{RANKS[launch.layout] - 1}/stdout.log"))
    logged = [step for stream in streams for step in steps(stream.read_text())]
    if len(logged) != count:
        raise ProofError(f"{launch.name}: {LAUNCHER.name} logged {len(logged)} of {count} steps")
    found = {name: [each[key] for each in logged] for name, key in LOGGED.items()}
    return {**found, **(decided(json.loads(audit.read_text())) if ours else {})}
