"""Rehearse unprepared upgrades of Megatron-Core, and write `proof/results/rehearsals.json` and its page.

`rehearse.py [VERSION ...]`, releases to upgrade to; all of `UPGRADES` without one. Each release is unpacked from its wheel and put
first on the path of a lane's Python; results of the others are kept as they are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from megacpp_overlays.upkeep.rehearsal import RehearsalRow, UpgradeRehearsal
from megacpp_overlays.upkeep.rehearsal import lines as rehearsal_lines

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".envs" / "mamba3-pinned" / "bin" / "python"
WHEELS = ROOT / ".cache" / "wheels"
RESULTS = ROOT / "proof" / "results" / "rehearsals.json"
UPGRADES = {"0.19.0": "0.18.2", "0.18.0": "0.17.1", "0.17.0": "0.16.1"}
"""The newest release that is remembered, by the one that comes out."""


def rehearse(version: str, folder: Path) -> dict[str, Any]:
    """Return the output of `megacpp-overlays rehearse` about a release."""
    (wheel,) = WHEELS.glob(f"megatron_core-{version}-cp312-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    command: list[str | Path] = [PYTHON, "-W", "ignore", "-m", "megacpp_overlays", "rehearse", "--json"]
    command += ["--known-until", f"megatron-core={UPGRADES[version]}", "--tree", str(folder)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    if done.returncode not in {0, 1}:
        sys.exit(f"the rehearsal of {version} ended with exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.replace(f"{folder}/", ""))  # evidence names files
    return {"to": version, "from": UPGRADES[version], "cpus": os.cpu_count(), **found}


def page(results: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = [
        "# Upgrades that nobody prepared",
        "",
        "Written by `make rehearse`. Everything that was learnt of releases after the first version is forgotten, the second one is",
        "put on the path, and an audit decides: on the day it comes out, and after one `megacpp-overlays witness`. The decision",
        "in the second column is the one with all that is known. An overlay is wrong if it is active and must not be, or out as repaired and is",
        "needed.",
    ]
    for each in results:
        rehearsal = read(each)
        took = f"`witness` took {rehearsal.seconds / 60:.1f} min on {each['cpus']} cores."
        lines += ["", f"## {each['from']} to {each['to']}", "", took, "", *rehearsal_lines(rehearsal)]
    return "\n".join(lines) + "\n"


def read(result: dict[str, Any]) -> UpgradeRehearsal:
    """Return a kept result as the rehearsal that it was."""
    rows = tuple(RehearsalRow(**row) for row in result["rows"])
    return UpgradeRehearsal(result["known_until"], result["release"], rows, result["seconds"])


def main(versions: list[str]) -> int:
    """Rehearse, write the results and their page; return 1 where something is wrong."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    found = {each["to"]: each for each in kept}
    for version in versions or UPGRADES:
        with tempfile.TemporaryDirectory() as folder:
            found[version] = rehearse(version, Path(folder))
    results = [found[version] for version in UPGRADES if version in found]
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(page(results))
    print(page(results))
    return int(any(read(each).wrong for each in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
