"""Take the environment of this Python through an unprepared upgrade, and train in it.

unprepared_upgrade.py --known-until megatron-core=0.18.2 --json proof/results/unprepared-upgrade.json \
    --write proof/results/unprepared-upgrade.md [--quick] [--keep FOLDER]

Everything that this package read in newer releases is forgotten, in every process of this program alone. `megacpp-overlays
witness` proves the overlays that are unproved then. With the witnesses that it keeps, the demo and the table of `proof/differential` run.
The exit code is 1 where an overlay is wrong, or a step of the demo or a row of the table is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megacpp_overlays.loader.settings import WITNESSES
from megacpp_overlays.source import knowledge
from megacpp_overlays.upkeep import rehearsal

PROJECT = Path(__file__).resolve().parents[1]
DEMO = PROJECT / "examples/train_tiny.py"
TABLE = PROJECT / "proof/differential/run.py"
INTRODUCTION = """\
# An upgrade that nobody prepared, and a run after it

Written by `make unprepared`. Every process forgets the findings of this package about {distribution} in releases after {last}, while
{release} is installed. An audit decides on that day, `megacpp-overlays witness` runs once, and with the witnesses that it keeps the
demo and the [table of configurations](differential-cpu.md) run, which compares training steps with float64.

"""


def main() -> int:
    """Rehearse, train, write the receipts and their page; return 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--known-until", required=True, metavar="DISTRIBUTION=VERSION")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="receipts")
    parser.add_argument("--write", type=Path, required=True, metavar="FILE", help="the page")
    parser.add_argument("--quick", action="store_true", help="leave out rows of the table that need four ranks")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where a run that was interrupted goes on")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="overlays at the same time")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        found = measured(given.known_until, given.keep or Path(made), given.quick, given.workers)
    given.json.write_text(json.dumps(found, indent=1) + "\n")
    given.write.write_text(page(found))
    print(page(found))
    return int(not found["holds"])


def measured(known_until: str, folder: Path, is_quick: bool, workers: int) -> dict[str, Any]:
    """Return the results of the day: each overlay before and after the proof, the demo, and the rows of the table.

    Args:
        known_until: `DISTRIBUTION=VERSION`, the newest release of which anything is remembered.
        folder: for witnesses and reports; a report that is there is taken as it is.
        is_quick: leaves out rows that need four ranks.
        workers: overlays that are proved at the same time.
    """
    witnesses = folder / "witnesses"
    witnesses.mkdir(parents=True, exist_ok=True)
    rehearsed = folder / "day.json"
    if not rehearsed.exists():
        day = rehearsal.rehearse(known_until, known_until.partition("=")[0], witnesses, {}, workers)
        rehearsed.write_text(json.dumps(day.as_dict()))
    forgetful = {**os.environ, knowledge.VARIABLE: known_until, WITNESSES: str(witnesses)}
    demo = _report([DEMO, "--device", "cpu"], folder / "demo.json", forgetful)
    table = _report([TABLE, *([] if is_quick else ["--full"])], folder / "table.json", forgetful)
    decisions = demo["audit"]["decisions"]
    active = {each["id"] for each in decisions if each["decision"] == rehearsal.NEEDED}
    found = {
        "rehearsal": {each: value for each, value in json.loads(rehearsed.read_text()).items() if each != "seconds"},
        "demo": {"claims": demo["claims"], "losses": [demo["losses"][0], demo["losses"][-1]], "active": sorted(active)},
        "table": {each: table[each] for each in ("holds", "versions", "active", "never called", "rows")},
    }
    return found | {"holds": holds(found)}


def holds(found: Mapping[str, Any]) -> bool:
    """Return whether no overlay is wrong, no claim of the demo failed, and overlays are right in every row of the table."""
    is_trained = all(each["outcome"] == "ok" for each in found["demo"]["claims"])
    return not read(found["rehearsal"]).wrong and is_trained and bool(found["table"]["holds"])


def read(kept: Mapping[str, Any]) -> rehearsal.UpgradeRehearsal:
    """Return kept receipts as the rehearsal that they are of, without its time."""
    rows = tuple(rehearsal.RehearsalRow(**row) for row in kept["rows"])
    return rehearsal.UpgradeRehearsal(kept["known_until"], kept["release"], rows, seconds=0.0)


def page(found: Mapping[str, Any]) -> str:
    """Return the receipts as Markdown."""
    day, demo, table = read(found["rehearsal"]), found["demo"], found["table"]
    distribution, _, last = day.known_until.partition("=")
    first, final = demo["losses"]
    outcomes = [each["outcome"] for each in table["rows"]]
    counts = ", ".join(f"{outcomes.count(each)} {each}" for each in dict.fromkeys(outcomes))
    never = ", ".join(table["never called"]) or "none"
    lines = [
        f"- **Overlays**: {day.summary()}.",
        f"- **Demo**: the loss falls from {first:.3f} to {final:.3f}; {len(demo['active'])} overlays are active in its process.",
        *(f"    - {each['outcome']}: {each['says']}" for each in demo["claims"]),
        f"- **Table**: {len(outcomes)} rows: {counts}. {len(table['active'])} overlays are active in its processes; never called in "
        f"any row: {never}.",
        "",
        *rehearsal.lines(day)[2:],
        "",
        "| row of the table | ranks | outcome |",
        "|---|---|---|",
        *(f"| {each['row']} | {each['ranks']} | {each['outcome']} |" for each in table["rows"]),
    ]
    return INTRODUCTION.format(distribution=distribution, last=last, release=day.release) + "\n".join(lines) + "\n"


def _report(command: list[Path | str], path: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the JSON that a program of this project writes to a path, and run it if it has not."""
    if not path.exists():
        words = [sys.executable, "-W", "ignore", *command, "--json", path]
        ended = subprocess.run(words, env=environment, stdout=subprocess.DEVNULL).returncode
        if not path.exists():
            raise RuntimeError(f"{Path(command[0]).name} wrote no report and ended with exit code {ended}")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


if __name__ == "__main__":
    sys.exit(main())
