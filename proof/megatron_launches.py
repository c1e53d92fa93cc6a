"""Megatron-LM's own `pretrain_hybrid.py`, launched in several ways: the launches, and their command lines."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from claims import Found, Say, Workplace
from megatron_launcher import Site, cause, ended, launched, prepared
from megatron_sizes import Sizes
from processes import EndedError


class Way(Enum):
    """How the launcher is started."""

    STOCK = "stock"
    AGAIN = "stock once more"
    ROUNDED = "stock, rounded otherwise"
    """With the variables that the sizes of this host name, if they name any: how far rounding alone takes it."""
    OVERLAYS = "overlays"
    """By `megacpp_overlays run`."""
    OFF = "overlays off"
    """By `megacpp_overlays run`, with MEGACPP_OVERLAYS=off."""


class Layout(Enum):
    """Over which ranks the model is trained."""

    ONE = "one rank"
    DATA = "two data-parallel ranks"
    TENSOR = "two tensor-parallel ranks"
    CONTEXT = "two context-parallel ranks"


CONTEXT = ("--context-parallel-size", "2", "--cp-comm-type", "allgather")
"""Sparse attention knows no other way to bring keys together."""
RANKS = {Layout.ONE: 1, Layout.DATA: 2, Layout.TENSOR: 2, Layout.CONTEXT: 2}


@dataclass(frozen=True)
class Launch:
    """One run of the launcher."""

    way: Way
    layout: Layout = Layout.ONE
    saves: bool = False
    """Whether it leaves a checkpoint half-way, and one at its end."""
    resumes: Launch | None = None
    """The run whose checkpoint, saved half-way, it goes on from."""

    @property
    def name(self) -> str:
        """How receipts call it."""
        begun = f", from a checkpoint of {self.resumes.name}" if self.resumes else ""
        return f"{self.way.value}, {self.layout.value}{begun}"


BOTH = (Way.STOCK, Way.OVERLAYS)
LAUNCHES = (
    *(Launch(way) for way in (Way.STOCK, Way.OVERLAYS, Way.AGAIN, Way.ROUNDED, Way.OFF)),
    *(Launch(way, layout) for layout in (Layout.DATA, Layout.TENSOR) for way in BOTH),
)
TAKES = f"{sum(each.layout is Layout.ONE for each in LAUNCHES)} launches on one GPU, {len(LAUNCHES) - 1} elsewhere"


def measure(place: Workplace, say: Say) -> Found:
    """Return the log and the decisions of each launch, and the version of the checkout."""
    site = prepared(place)
    return {**site.about(), "steps": site.sizes.steps, "runs": all_of(LAUNCHES, site, say)}


def all_of(launches: Sequence[Launch], site: Site, say: Say, *, may_fail: Collection[Launch] = ()) -> dict[str, Found]:
    """Return the logs of the launches that this host has the devices for.

    Args:
        launches: in their order: a run that saves comes before those that go on from its checkpoint.
        site: where.
        say: called with each line of progress.
        may_fail: launches whose bad end is an answer, too.

    Raises:
        EndedError: another one ended badly.
    """
    here = [each for each in launches if ranks(each) <= site.sizes.devices]
    here = [each for each in here if each.way is not Way.ROUNDED or site.sizes.rounds]
    runs = {}
    for number, launch in enumerate(here, start=1):
        began = time.monotonic()
        runs[launch.name] = run = _run(launch, site, may_fail=launch in may_fail)
        say(f"[{number}/{len(here)}] Megatron: {launch.name}: {ended(run)}, {time.monotonic() - began:.0f} s")
    return runs


def _run(launch: Launch, site: Site, *, may_fail: bool) -> Found:
    switches = {Way.OFF: {"MEGACPP_OVERLAYS": "off"}, Way.ROUNDED: site.sizes.rounds}.get(launch.way, {})
    words = arguments(launch, site.sizes, site.folder)
    ours = launch.way in {Way.OVERLAYS, Way.OFF}
    try:
        return launched(site, launch.name, words, overlays=ours, switches=switches, ranks=RANKS[launch.layout])
    except EndedError as error:
        if not may_fail:
            raise
        return {"error": cause(error.wrote)}


def ranks(launch: Launch) -> int:
    """Return how many ranks a launch takes, or took before it."""
    return max(RANKS[launch.layout], ranks(launch.resumes) if launch.resumes else 1)


def arguments(launch: Launch, chosen: Sizes, folder: Path) -> list[str]:
    """Return the arguments of one launch in addition to those of the sizes."""
    words = ["--train-iters", str(chosen.steps)]
    if launch.saves:
        words += ["--save", str(checkpoint(launch, folder)), "--save-interval", str(chosen.saved)]
    if launch.resumes:
        words += ["--load", str(checkpoint(launch.resumes, folder)), "--ckpt-step", str(chosen.saved)]
    if Layout.DATA in {launch.layout, launch.resumes.layout if launch.resumes else None}:
        words += ["--use-distributed-optimizer", "--overlap-grad-reduce"]
    if launch.layout is Layout.TENSOR:
        words += ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    if launch.layout is Layout.CONTEXT:
        words += CONTEXT
    return words


def checkpoint(launch: Launch, folder: Path) -> Path:
    """Return the folder of the checkpoints that a launch leaves."""
    return folder / f"checkpoints-{launch.way.name}-{launch.layout.name}".lower()
