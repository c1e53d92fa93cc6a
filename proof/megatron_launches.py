"""Megatron-LM's own `pretrain_hybrid.py`, launched in several ways: what is launched, and what it logs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from claims import Found, Say, Workplace
from megatron_checkout import LAUNCHER, WAY_OUT, Checkout, copied
from megatron_sizes import Sizes, sizes
from processes import RUN, ProofError, start
from upstream_tests import LAUNCHERS, calls

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


class Way(Enum):
    """How the launcher is started."""

    STOCK = "stock"
    AGAIN = "stock once more"
    OVERLAYS = "overlays"
    """By `megacpp_overlays run`."""
    OFF = "overlays off"
    """By `megacpp_overlays run`, with MEGACPP_OVERLAYS=off."""


class Layout(Enum):
    """Over which ranks the model is trained."""

    ONE = "one rank"
    DATA = "two data-parallel ranks"
    TENSOR = "two tensor-parallel ranks"


RANKS = {Layout.ONE: 1, Layout.DATA: 2, Layout.TENSOR: 2}


@dataclass(frozen=True)
class Launch:
    """One run of the launcher."""

    way: Way
    layout: Layout = Layout.ONE
    resumes: Launch | None = None
    """The run whose checkpoint, saved half-way, it goes on from."""

    @property
    def name(self) -> str:
        """How receipts call it."""
        begun = f", from a checkpoint of {self.resumes.name}" if self.resumes else ""
        return f"{self.way.value}, {self.layout.value}{begun}"


BOTH = (Way.STOCK, Way.OVERLAYS)
SAVED = tuple(Launch(way, layout) for layout in (Layout.ONE, Layout.DATA) for way in BOTH)
"""These leave a checkpoint half-way."""
RESHARDED = tuple(Launch(way, resumes=Launch(way, Layout.DATA)) for way in BOTH)
"""These go on over another number of ranks. They may fail: without Transformer Engine and Apex, Megatron's own do."""
LAUNCHES = (
    *SAVED,
    Launch(Way.AGAIN),
    Launch(Way.OFF),
    *(Launch(way, resumes=Launch(source)) for way in BOTH for source in BOTH),
    *RESHARDED,
    *(Launch(way, Layout.TENSOR) for way in BOTH),
)


def measure(place: Workplace, say: Say) -> Found:
    """Return what each launch logged, what was decided in it, and what the checkout is."""
    if place.checkout is None:
        raise ProofError(f"no checkout of Megatron-LM was given: {WAY_OUT}")
    copy = place.folder / "checkout"
    copy.mkdir()
    checkout = copied(place.checkout, copy)
    chosen = sizes(quick=place.quick)
    launches = [each for each in LAUNCHES if ranks(each) <= chosen.devices]
    runs = {}
    for number, launch in enumerate(launches, start=1):
        began = time.monotonic()
        try:
            runs[launch.name] = run = launched(launch, checkout, chosen, place.folder)
        except ProofError as error:
            if launch not in RESHARDED:
                raise
            runs[launch.name] = run = {"error": _cause(str(error))}
        took = time.monotonic() - began
        end = run.get("error") or f"loss {run['losses'][0]:.3f} to {run['losses'][-1]:.3f}"
        say(f"[{number}/{len(launches)}] Megatron: {launch.name}: {end}, {took:.0f} s")
    return {
        "checkout": {"version": checkout.version, "commit": checkout.commit, LAUNCHER: checkout.launcher_sha256},
        "host": chosen.host,
        "pattern": chosen.pattern,
        "arguments": list(chosen.arguments),
        "steps": chosen.steps,
        "saved": chosen.saved,
        "runs": runs,
    }


def ranks(launch: Launch) -> int:
    """Return how many ranks a launch takes, or took before it."""
    return max(RANKS[launch.layout], ranks(launch.resumes) if launch.resumes else 1)


def _cause(text: str) -> str:
    """Return the last exception of a traceback, without the rank in front; where it says nothing, the line that raised it."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line).rstrip() for line in text.splitlines()]
    raised = [place for place, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    if not raised:
        return lines[-1]
    cause = lines[raised[-1]]
    places = [re.match(r'  File "(.*)", line (\d+), in', line) for line in lines[: raised[-1]]]
    if cause.isidentifier() and (frames := [place for place, found in enumerate(places) if found]):
        file, number = places[frames[-1]].groups()  # type: ignore[union-attr]
        cause += f" at {Path(file).name}:{number}: {lines[frames[-1] + 1].strip()}"
    return cause


def launched(launch: Launch, checkout: Checkout, chosen: Sizes, folder: Path) -> Found:
    """Run the launcher once and return what it logged."""
    stem = re.sub(r"\W+", "-", launch.name)
    audit = folder / f"{stem}.audit.json"
    ours = launch.way in {Way.OVERLAYS, Way.OFF}
    words: list[str | Path] = [*RUN, "--audit", audit, "--verify-ranks"] if ours else []
    words += [*TORCHRUN, str(RANKS[launch.layout]), checkout.folder / LAUNCHER, *arguments(launch, chosen, folder)]
    env = {**chosen.env, **({"MEGACPP_OVERLAYS": "off"} if launch.way is Way.OFF else {})}
    path = [*chosen.path, LAUNCHERS, checkout.folder]
    text = start(words, env, path=path, cwd=checkout.folder)
    logged = steps(text)
    if not logged:
        raise ProofError(f"{launch.name}: {LAUNCHER} logged no step")
    found = {name: [each[key] for each in logged] for name, key in LOGGED.items()}
    found["peak_mib"] = peak_mib(text)
    return {**found, **(decided(json.loads(audit.read_text())) if ours else {})}


def arguments(launch: Launch, chosen: Sizes, folder: Path) -> list[str]:
    """Return the command line of one launch."""
    words = [*chosen.arguments, "--train-iters", str(chosen.steps)]
    if launch in SAVED:
        words += ["--save", str(checkpoint(launch, folder)), "--save-interval", str(chosen.saved)]
    if launch.resumes:
        words += ["--load", str(checkpoint(launch.resumes, folder)), "--ckpt-step", str(chosen.saved)]
    if Layout.DATA in {launch.layout, launch.resumes.layout if launch.resumes else None}:
        words += ["--use-distributed-optimizer", "--overlap-grad-reduce"]
    if launch.layout is Layout.TENSOR:
        words += ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    return words


def checkpoint(launch: Launch, folder: Path) -> Path:
    """Return the folder of the checkpoints that a launch leaves."""
    return folder / f"checkpoints-{launch.way.name}-{launch.layout.name}".lower()


LOGGED = {
    "iterations": "iteration",
    "losses": "lm loss",
    "norms": "grad norm",
    "skipped": "number of skipped iterations",
    "nans": "number of nan iterations",
    "ms": "elapsed time per iteration (ms)",
}
"""What is kept of a step, by the words of Megatron's log."""


def steps(text: str) -> list[dict[str, float]]:
    """Return the steps of a log, each with what its line names."""
    found = []
    for line in text.splitlines():
        if not (begin := re.search(r"\biteration +(\d+)/ *\d+ \|", line)):
            continue
        pairs = (each.rpartition(":") for each in line[begin.end() :].split("|"))
        step = {name.strip(): float(value) for name, _, value in pairs if name.strip()}
        found.append({"iteration": float(begin[1]), **step})
    return found


def peak_mib(text: str) -> float:
    """Return the most memory of a device that a log speaks of, in MiB, which Megatron calls MB."""
    return max((float(each) for each in re.findall(r"\bmax allocated: ([\d.]+)", text)), default=0.0)


def decided(audit: Found) -> Found:
    """Return what an audit says: decisions, calls of what is active, and whether ranks agreed."""
    decisions: Sequence[Found] = audit["decisions"]
    return {
        "decisions": {each["id"]: each["decision"] for each in decisions},
        "calls": calls(decisions),
        "ranks": audit.get("ranks"),
    }
