"""Rehearse upgrades of Megatron-Core that nobody prepared, and write `proof/results/rehearsals.json` and its page.

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

from megacpp_overlays.upkeep.rehearsal import Rehearsed

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".envs" / "mamba3-pinned" / "bin" / "python"
WHEELS = ROOT / ".cache" / "wheels"
RESULTS = ROOT / "proof" / "results" / "rehearsals.json"
UPGRADES = {"0.19.0": "0.18.2", "0.18.0": "0.17.1", "0.17.0": "0.16.1"}
"""The newest release that is remembered, by the one that comes out."""
RIGHT = {"active", "retired", "absent", "gated"}


def rehearse(version: str, folder: Path) -> dict[str, Any]:
    """Return what `megacpp-overlays rehearse` says of a release."""
    (wheel,) = WHEELS.glob(f"megatron_core-{version}-cp312-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    command: list[str | Path] = [PYTHON, "-W", "ignore", "-m", "megacpp_overlays", "rehearse", "--json"]
    command += ["--known-until", f"megatron-core={UPGRADES[version]}", "--tree", str(folder)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    if done.returncode not in {0, 1}:
        sys.exit(f"the rehearsal of {version} ended with exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return {"to": version, "from": UPGRADES[version], "cpus": os.cpu_count(), **found}


def page(results: list[dict[str, Any]]) -> str:
    """Return the results as Markdown: one table of upgrades, and what is not as it should be after `witness`."""
    lines = [
        "# Upgrades that nobody prepared",
        "",
        "Written by `make rehearse`. Everything that was learnt of releases after the first version is forgotten, the second one is",
        "put on the path, and an audit decides: on the day it comes out, and after one `megacpp-overlays witness`. *Right* is the",
        "decision with all that is known. An overlay is wrong if it is active and must not be, or out as repaired and is needed.",
        "",
        "| from | to | overlays that are needed | active on the day | active after `witness` | unproved | wrong | `witness` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        needed = [row for row in each["rows"] if row["right"] == "active"]
        before, after = (sum(row[when] == "active" for row in needed) for when in ("before", "after"))
        open_ = sum(row["after"] not in RIGHT for row in needed)
        took = f"{each['seconds'] / 60:.1f} min on {each['cpus']} cores"
        lines.append(
            f"| {each['from']} | {each['to']} | {len(needed)} | {before} | {after} | {open_} | {len(wrong(each))} | {took} |"
        )
    for each in results:
        other = [row for row in each["rows"] if row["after"] != row["right"]]
        lines += ["", f"## {each['from']} to {each['to']}", ""]
        if not other:
            lines.append("After `witness` every decision is the right one.")
            continue
        lines += ["| overlay | right | on the day | after `witness` | reason |", "|---|---|---|---|---|"]
        for row in other:
            reason = " ".join(row["reason"].split()).replace("|", "/")
            reason = f"{reason[:280]} ..." if len(reason) > 280 else reason
            lines.append(f"| {row['overlay']} | {row['right']} | {row['before']} | {row['after']} | {reason} |")
    return "\n".join(lines) + "\n"


def wrong(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the overlays that were installed and must not be, or were left out as repaired and are needed."""
    return [row for row in result["rows"] if Rehearsed(**row).is_wrong]


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
    return int(any(wrong(each) for each in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
