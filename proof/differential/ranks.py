"""Run rows on one or more sides: `ranks.py FOLDER SIDES [NAME ...]`, and write the result of each row into the folder.

A side is `stock`, `overlays`, `reference` (float64, one rank, stock) or `rounding` (the reference in the dtype of the row). A process imports
upstream once and is copied for each rank: rows of as many ranks run one after another in the same copies.
"""

from __future__ import annotations

import sys

if sys.argv[2:3] == ["overlays"]:
    import megacpp_overlays  # as a launcher does: before torch and everything that it repairs

# isort: split
import contextlib
import datetime
import itertools
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from differential.host import ON_CPU, prepare
from differential.rows import Row
from differential.table import ROWS

GRACE_S = 20
"""How long a rank may go on after another has ended in an error: over gloo it sees that its connection is closed, over NCCL it waits."""
PATIENCE = datetime.timedelta(seconds=240 if ON_CPU else 60)


def asked(side: str, row: Row) -> Row:
    """Return the row that a side runs for a row."""
    if side == "reference":
        return row.reference
    if side == "rounding":
        return replace(row.reference, dtype=row.dtype)
    return row


def run(side: str, rows: list[Row], folder: Path) -> None:
    """Run all rows of a side; a row that ends in an error ends its ranks, and others go on in new ones."""
    for ranks in sorted({asked(side, row).ranks for row in rows}):
        left = [row for row in rows if asked(side, row).ranks == ranks]
        left.sort(key=lambda row: asked(side, row).layout)
        while left:
            _ranks(ranks, side, left, folder)
            ended = [row for row in left if not _place(folder, side, row).exists()]
            left = ended[1:]


def _place(folder: Path, side: str, row: Row) -> Path:
    return folder / f"{side} {ROWS.index(row)}.pt"


def _ranks(count: int, side: str, rows: list[Row], folder: Path) -> None:
    """Run rows in so many ranks; where one ends in an error, others that wait for it are ended."""

    # A copy cannot use a device that this process has touched.
    context = multiprocessing.get_context("fork" if ON_CPU else "spawn")
    meet = folder / f"meet {side} {count} {len(rows)}"
    started = [context.Process(target=_rank, args=(rank, count, side, rows, folder, meet)) for rank in range(count)]
    for each in started:
        each.start()
    alive = started
    while alive and not any(each.exitcode for each in started):
        multiprocessing.connection.wait([each.sentinel for each in alive])
        alive = [each for each in alive if each.is_alive()]
    for each in started:
        each.join(GRACE_S if any(other.exitcode for other in started) else None)
        if each.is_alive():
            each.kill()
            each.join()


def _rank(rank: int, count: int, side: str, rows: list[Row], folder: Path, meet: Path) -> None:
    prepare()
    import torch
    from differential.steps import groups_for

    if not ON_CPU:
        devices = torch.cuda.device_count()
        torch.cuda.set_device(rank % devices)
        if devices < count:  # NCCL refuses two ranks of one host on one device
            os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        torch.backends.cudnn.allow_tf32 = False
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
    torch.distributed.init_process_group(
        "gloo" if ON_CPU else "nccl", init_method=f"file://{meet}", rank=rank, world_size=count, timeout=PATIENCE
    )
    is_last = (
        rank == count - 1
    )  # the stage of a pipeline on which launchers log; an audit on every rank would take longer than rows
    before = _calls(side) if is_last else {}
    for layout, same in itertools.groupby(rows, lambda row: asked(side, row).layout):
        with groups_for(layout):
            for row in same:
                found = _tried(side, row, folder / f"{side} {ROWS.index(row)}.error.{rank}")
                if is_last:
                    after = _calls(side)
                    found["calls"] = {name: number - before.get(name, 0) for name, number in after.items()}
                    before = after
                    torch.save(found, _place(folder, side, row))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _tried(side: str, row: Row, errors: Path) -> dict[str, Any]:
    """Return the numbers of a row; where it ends in an error, so does this process, and other ranks see its connections close."""
    from differential.float64 import float64
    from differential.steps import step

    here, began = asked(side, row), time.process_time()
    try:
        with float64() if here.dtype == "float64" else contextlib.nullcontext():
            found = step(here)
    except Exception as error:  # noqa: BLE001 - stock may end in any error, which is then its result
        said = traceback.format_exception_only(error)[-1].strip()
        errors.write_text(f"{said}\n{traceback.format_exc()}")
        os._exit(1)
    return {**found, "seconds": time.process_time() - began}


def _calls(side: str) -> dict[str, int]:
    """Return how often the seams of each active overlay were called on this rank."""
    found: dict[str, int] = {}
    if side == "overlays":
        for record in megacpp_overlays.audit().records:
            if record.decision.value == "active":
                found[record.overlay.id] = found.get(record.overlay.id, 0) + sum(count for _, count in record.calls)
    return found


def main() -> None:
    """Run the rows of the command line on its sides."""
    logging.disable(logging.ERROR)
    folder, sides, *names = Path(sys.argv[1]), sys.argv[2].split(","), *sys.argv[3:]
    prepare()
    import differential.steps  # noqa: F401 - once, before the copies

    rows = [row for row in ROWS if not names or row.name in names]
    for side in sides:
        run(side, rows, folder)
    if "overlays" in sides:
        (folder / "audit.json").write_text(json.dumps(megacpp_overlays.audit().as_dict()))


if __name__ == "__main__":
    main()
