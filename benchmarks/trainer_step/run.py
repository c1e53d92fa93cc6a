"""Steps of the Trainer of transformers with Liger's loss, as it is and with the overlay `liger-flce-labelled`.

    python benchmarks/trainer_step/run.py [--json FILE] [--write FILE.md]
    python benchmarks/trainer_step/run.py --device cpu --quick        with liger-kernel 0.8.2 or newer on the path

Each way trains in processes of its own: `launcher.py`, by `python -m megacpp_overlays run`. The first backward pass of a
process decides whether tokens are skipped, so rows with all tokens labelled have another process than those with some.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # parts are named from the folder of all benchmarks
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import os
import subprocess
import tempfile
import time
import traceback
from typing import Any

# Before the import: overlays are off in this process and set in those that it launches.
os.environ["MEGACPP_OVERLAYS"] = "off"
os.environ.setdefault("MEGACPP_OVERLAYS_LOG", "logging")

# isort: split
import report
import timing
from progress import say
from trainer_step import page

LAUNCHER = Path(__file__).with_name("launcher.py")
SWITCH = "MEGACPP_OVERLAY_LIGER_FLCE_LABELLED"
LOGITS = "MEGACPP_LINEAR_CE_LOGITS"
WAYS: dict[str, dict[str, str]] = {
    page.TORCH: {SWITCH: "off"},
    page.STOCK: {SWITCH: "off"},
    page.OVERLAY: {SWITCH: "on"},
    page.KEPT: {SWITCH: "on", LOGITS: "auto"},
}
SHARES = ((1.0,), (0.5, 0.25, 0.1))
"""Of tokens that are labelled, by process."""
SIZE = {"rows": 4, "tokens": 2048, "vocabulary": 128256, "hidden": 2048, "heads": 32, "layers": 16, "steps": 16}
"""Of Llama 3.2 1B."""
QUICK_SHARES = ((0.25,),)
QUICK = {"rows": 2, "tokens": 160, "vocabulary": 64, "hidden": 32, "heads": 4, "layers": 1, "steps": 3}
CURVES = {**SIZE, "layers": 4, "steps": 30}
CURVE_SHARE, CURVE_WORDS = 0.25, ("--master", "--rate", "1e-4")
"""Losses are compared where training is tame: a shallow model with parameters in float32, under autocast."""
LONGEST_S = 1800
NAMES = ("triton", "liger-kernel", "transformers", "accelerate")
"""Distributions whose versions count."""


def launched(
    way: str, shares: tuple[float, ...], size: dict[str, int], *more: str, on_cpu: bool
) -> list[dict[str, Any]]:
    """Return the measurements of one process; `more` goes to the launcher.

    Raises:
        RuntimeError: the process fails, or the overlay is not in the state that the way asks for.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, audit = Path(folder, "log.json"), Path(folder, "audit.json")
        words = [*more, *(word for name, value in size.items() for word in (f"--{name}", str(value)))]
        if way == page.TORCH:
            words.append("--no-liger")
        launcher = [str(LAUNCHER), "--log", str(log), "--shares", *map(str, shares), *words]
        command = [sys.executable, "-W", "ignore", "-m", "megacpp_overlays", "run", "--audit", str(audit), *launcher]
        env = {
            **os.environ,
            "MEGACPP_OVERLAYS": "auto",
            "MEGACPP_OVERLAYS_LOG": "logging",
            **({"TRITON_INTERPRET": "1"} if on_cpu else {}),
            **WAYS[way],
        }
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=LONGEST_S)
        if done.returncode:
            raise RuntimeError(f"{way}, {shares}: exit code {done.returncode}\n{done.stderr[-3000:]}")
        found: list[dict[str, Any]] = json.loads(log.read_text())
        decided = decision(audit)
        if way != page.TORCH and (decided == "active") != (WAYS[way][SWITCH] == "on"):
            raise RuntimeError(f"{way}: the overlay is {decided}")
        return found


def decision(audit: Path) -> str:
    """Return the decision on the overlay in a process."""
    decisions = json.loads(audit.read_text())["decisions"]
    return next((str(each["decision"]) for each in decisions if each["id"] == "liger-flce-labelled"), "unknown")


def main() -> None:
    """Run all ways, and make the page of their results."""
    parser = argparse.ArgumentParser(description="Time steps of the Trainer with Liger's loss.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--json", type=Path, help="keep the numbers in this file")
    parser.add_argument("--write", type=Path, help="keep the page in this file")
    parser.add_argument("--plot", type=Path, help="keep the plot in this file, as SVG")
    chosen = parser.parse_args()
    size = QUICK if chosen.quick else SIZE
    start = time.monotonic()
    found: dict[str, Any] = {"size": size, "ways": {}, "problems": [], **timing.about(chosen.device, *NAMES)}
    on_cpu = chosen.device == "cpu"
    jobs: list[tuple[str, tuple[float, ...], bool]] = [
        (way, shares, False) for way in chosen.ways for shares in (QUICK_SHARES if chosen.quick else SHARES)
    ]
    if not chosen.quick:
        jobs += [(way, (CURVE_SHARE,), True) for way in chosen.ways]
    for number, (way, shares, is_curve) in enumerate(jobs, start=1):
        began = time.monotonic()
        job = "curve of losses" if is_curve else f"steps with {', '.join(f'{each:.0%}' for each in shares)} labelled"
        say(f"[{number}/{len(jobs)}] {way}: {job} ({began - start:.0f} s so far)")
        try:
            rows = launched(
                way, shares, CURVES if is_curve else size, *(CURVE_WORDS if is_curve else ()), on_cpu=on_cpu
            )
        except (RuntimeError, OSError, ValueError, subprocess.TimeoutExpired):
            found["problems"].append(traceback.format_exc())
            say("   failed")
            continue
        if is_curve:
            found.setdefault("curves", {})[way] = rows[0]["losses"]
            said = f"loss {rows[0]['losses'][0]:.4f} to {rows[0]['losses'][-1]:.4f}"
        else:
            found["ways"].setdefault(way, {}).update({f"{row['share']:g}": row for row in rows})
            said = ", ".join(f"{row['share']:.0%}: {row['step']:.1f} ms, its loss {row['alone']:.1f}" for row in rows)
        say(f"   {said} ({time.monotonic() - began:.0f} s)")
        found["seconds"] = time.monotonic() - start
        report.keep(found, chosen.json)
    report.publish(found, chosen, page.markdown, page.svg)
    if found["problems"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
