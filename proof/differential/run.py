"""Run the table: `python proof/differential/run.py [--gpu] [--full] [--json PATH] [--write PATH] [ROW ...]`.

Needs megatron-core and einops in addition to this project. On a CPU ranks meet with gloo. With `--gpu` they meet with NCCL, on as many devices
as there are: where ranks are more than devices, they share them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROOF = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROOF))
PROGRAM = PROOF / "differential/ranks.py"
PROJECT = PROOF.parent


def environment(device: str) -> dict[str, str]:
    """Return the variables of a process whose tensors are on a device."""
    path = [*([PROOF / "on_cpu_unpinned"] if device == "cpu" else []), PROOF / "launchers", PROOF, PROJECT]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONWARNINGS": "ignore",
        "DIFFERENTIAL_ON": device,
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "MEGACPP_OVERLAYS_LOG": "logging",
        "MEGACPP_OVERLAYS_SMALL_CALLS": "overlay",  # rows are small; without it overlays that save memory leave them to upstream
    }


def measured(folder: Path, device: str, names: list[str]) -> None:
    """Run all sides; those of float64 are on the CPU."""
    jobs = [(device, "rounding,stock"), (device, "overlays")]
    jobs = [("cpu", "reference"), *jobs] if device != "cpu" else [("cpu", "reference,rounding,stock"), jobs[1]]
    started = [
        subprocess.Popen([sys.executable, str(PROGRAM), str(folder), sides, *names], env=environment(where))
        for where, sides in jobs
    ]
    codes = [each.wait() for each in started]
    if any(codes):
        raise RuntimeError(f"processes of the table ended with {codes}: see their output above")


def main() -> None:
    """Run the table and print its result; the exit code is 1 where overlays are wrong in a row."""
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--gpu", action="store_true", help="ranks on GPUs, over NCCL")
    words.add_argument("--full", action="store_true", help="rows of four ranks, too")
    words.add_argument("--json", type=Path, help="where receipts go")
    words.add_argument("--write", type=Path, help="where the page goes")
    words.add_argument("--keep", type=Path, help="a folder for the results of each side, empty or new")
    words.add_argument("rows", nargs="*", help="names of rows; all if none is given")
    given = words.parse_args()
    from differential.page import page, receipts
    from differential.table import ROWS

    rows = [row for row in ROWS if row.name in given.rows or (not given.rows and (given.full or not row.full))]
    with tempfile.TemporaryDirectory() as made:
        folder = given.keep or Path(made)
        folder.mkdir(exist_ok=True)
        if any(folder.iterdir()):
            words.error(f"{folder} is not empty: ranks would meet where others met before")
        measured(folder, "cuda" if given.gpu else "cpu", [row.name for row in rows])
        found: dict[str, Any] = receipts(folder, rows, given.gpu)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    if given.write:
        given.write.write_text(page(found))
    print(page(found))
    sys.exit(int(not found["holds"]))


if __name__ == "__main__":
    main()
