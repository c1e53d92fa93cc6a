"""The Trainer of transformers, launched in several ways: the launches, and the losses that they log."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from archives import LIGER, unpack
from claims import Found, Say, Workplace
from processes import RUN, start
from trainer_sizes import Sizes, sizes

LAUNCHER = Path(__file__).resolve().parent / "launchers" / "hf_trainer.py"
OVERLAY = "liger-flce-none-backward"
SWITCH = "MEGACPP_OVERLAY_LIGER_FLCE_NONE_BACKWARD"
ONE_IMPORT = (
    "import megacpp_overlays, runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


class Data(Enum):
    """The data that the launcher trains on."""

    PROMPTS = "prompts"
    """The first tokens do not count, as in tuning on answers."""
    WEIGHTS = "weights"
    """Every token counts, some more."""


class Way(Enum):
    """How a launch comes to its loss."""

    TORCH = "PyTorch"
    STOCK = "stock"
    OVERLAY = "overlay"
    """By `megacpp_overlays run`."""
    IMPORT = "one import"
    """By hand: this package is imported in front of the script."""
    OFF = "overlay off"
    NEWER = "overlay, Liger 0.8.5"


@dataclass(frozen=True)
class Launch:
    """One run of the launcher."""

    data: Data
    way: Way

    @property
    def name(self) -> str:
        """The key of the run in the receipts."""
        return f"{self.data.value}, {self.way.value}"


LAUNCHES = (
    *(Launch(data, way) for data in Data for way in (Way.TORCH, Way.STOCK, Way.OVERLAY)),
    Launch(Data.PROMPTS, Way.IMPORT),
    Launch(Data.WEIGHTS, Way.OFF),
    Launch(Data.PROMPTS, Way.NEWER),
)


def measure(place: Workplace, say: Say) -> Found:
    """Return the losses and gradient norms of every launch, and its decisions."""
    chosen = sizes(on_gpu=place.on_gpu, quick=place.quick)
    newer = unpack(place.archives, LIGER, "src", place.folder)
    runs = {}
    for number, launch in enumerate(LAUNCHES, start=1):
        began = time.monotonic()
        runs[launch.name] = run = launched(launch, chosen, newer, place.folder)
        took = time.monotonic() - began
        end = f"loss {run['losses'][0]:.3f} to {run['losses'][-1]:.3f}"
        say(f"[{number}/{len(LAUNCHES)}] Trainer: {launch.name}: {end}, {took:.0f} s")
    return {"host": chosen.host, "sizes": chosen.says, "steps": chosen.steps, "runs": runs}


def launched(launch: Launch, chosen: Sizes, newer: Path, folder: Path) -> Found:
    """Run the launcher once and return its log."""
    log, audit = folder / f"{launch.name}.json", folder / f"{launch.name}.audit.json"
    words: list[str | Path] = [LAUNCHER, "--log", log, "--steps", str(chosen.steps), "--data", launch.data.value]
    words += chosen.words
    words += ["--loss", "torch" if launch.way is Way.TORCH else "liger"]
    has_audit = launch.way in {Way.OVERLAY, Way.OFF, Way.NEWER}
    if has_audit:
        words = [*RUN, "--audit", audit, *words]
    elif launch.way is Way.IMPORT:
        words = ["-c", ONE_IMPORT, *words]
    start(
        words,
        {**chosen.env, **({SWITCH: "off"} if launch.way is Way.OFF else {})},
        path=[newer] if launch.way is Way.NEWER else [],
        cwd=folder,
    )
    logged = [each for each in json.loads(log.read_text()) if "loss" in each]
    found: Found = {
        "losses": [each["loss"] for each in logged],
        "norms": [each["grad_norm"] for each in logged],
    }
    if has_audit:
        decisions = json.loads(audit.read_text())["decisions"]
        (record,) = [each for each in decisions if each["id"] == OVERLAY]
        found |= {"decision": record["decision"], "version": record["version"], "reason": record["reason"]}
        found["calls"] = sum(record["calls"].values())
    return found
