"""Run the table: `python proof/differential/run.py [--gpu] [--full] [--json PATH] [--write PATH] [ROW ...]`.

It needs megatron-core and einops in addition to this project. Ranks communicate with gloo on the CPU. With `--gpu` they communicate with
NCCL on all visible devices, and share devices if there are more ranks than devices.
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
    """Return the environment of a process whose tensors are on `device`, `cpu` or `cuda`."""
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
        "MEGACPP_OVERLAYS_SMALL_CALLS": "overlay",  # else overlays that save memory call upstream for small inputs, as those of rows are
    }


def measured(folder: Path, device: str, names: list[str]) -> None:
    """Run all sides of the named rows, or of all rows if there are no names, and write their results into `folder`.

    The sides run in two or three processes at the same time. The float64 reference is always on the CPU.

    Raises:
        RuntimeError: a process ended with another exit code than 0.
    """
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
    """Run the table and print its page; the exit code is 0 if the outcome of every row is good, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="ranks on GPUs, over NCCL")
    parser.add_argument("--full", action="store_true", help="rows of four ranks, too")
    parser.add_argument("--json", type=Path, help="where receipts go")
    parser.add_argument("--write", type=Path, help="where the page goes")
    parser.add_argument("--keep", type=Path, help="a folder for the results of each side, empty or new")
    parser.add_argument("rows", nargs="*", help="names of rows; without one all, those of four ranks only with --full")
    arguments = parser.parse_args()
    from differential.page import page, receipts
    from differential.table import ROWS

    if unknown := sorted({*arguments.rows} - {row.name for row in ROWS}):
        parser.error(f"there is no row {', '.join(unknown)}; there are {', '.join(row.name for row in ROWS)}")
    rows = [
        row for row in ROWS if row.name in arguments.rows or (not arguments.rows and (arguments.full or not row.full))
    ]
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            parser.error(f"{folder} is not empty: ranks would meet where others met before")
        measured(folder, "cuda" if arguments.gpu else "cpu", [row.name for row in rows])
        found: dict[str, Any] = receipts(folder, rows, arguments.gpu)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.write:
        arguments.write.write_text(page(found))
    print(page(found))
    sys.exit(int(not found["holds"]))


if __name__ == "__main__":
    main()
