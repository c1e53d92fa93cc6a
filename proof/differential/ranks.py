"""Run rows on one or more sides: `ranks.py FOLDER SIDES [NAME ...]`, and leave what each row came to in the folder.

A side is `stock`, `overlays`, `reference` (float64, one rank, stock) or `rounding` (the reference in the dtype of the row). A process imports
upstream once and is copied for each rank: rows of as many ranks run one after another in the same copies.
"""

from __future__ import annotations

import sys

OURS = "overlays"
if sys.argv[2:3] == [OURS]:
    import megacpp_overlays  # as a launcher does: before torch and everything that it repairs

# isort: split
import contextlib
import datetime
import json
import logging
import multiprocessing
import os
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from differential.host import ON_CPU, prepare
from differential.rows import Row
from differential.table import ROWS

PATIENCE = datetime.timedelta(seconds=240 if ON_CPU else 60)


def asked(side: str, row: Row) -> Row:
    """Return what a side runs of a row."""
    if side == "reference":
        return row.reference
    if side == "rounding":
        return replace(row.reference, dtype=row.dtype)
    return row


def run(side: str, rows: list[Row], folder: Path) -> None:
    """Run all rows of a side; a row that ends in an error ends its ranks, and others go on in new ones."""
    for ranks in sorted({asked(side, row).ranks for row in rows}):
        left = [row for row in rows if asked(side, row).ranks == ranks]
        while left:
            _ranks(ranks, side, left, folder)
            ended = [row for row in left if not _place(folder, side, row).exists()]
            left = ended[1:]


def _place(folder: Path, side: str, row: Row) -> Path:
    return folder / f"{side} {ROWS.index(row)}.pt"


def _ranks(count: int, side: str, rows: list[Row], folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    meet = folder / f"meet {side} {count} {len(rows)}"
    started = [context.Process(target=_rank, args=(rank, count, side, rows, folder, meet)) for rank in range(count)]
    for each in started:
        each.start()
    for each in started:
        each.join()


def _rank(rank: int, count: int, side: str, rows: list[Row], folder: Path, meet: Path) -> None:
    import torch
    from differential.float64 import float64
    from differential.steps import step

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
    for row in rows:
        here = asked(side, row)
        began, before = time.process_time(), _calls(side)
        try:
            with float64() if here.dtype == "float64" else contextlib.nullcontext():
                found = step(here)
        except Exception as error:  # noqa: BLE001 - stock may end in any error, which is then what is said of it
            found = traceback.format_exception_only(error)[-1].strip()
            (folder / f"{side} {ROWS.index(row)}.error.{rank}").write_text(f"{found}\n{traceback.format_exc()}")
            os._exit(1)
        calls = {name: number - before[name] for name, number in _calls(side).items()}
        every: list[Any] = [None] * count
        torch.distributed.all_gather_object(every, (calls, time.process_time() - began))
        if rank == 0:
            found["calls"] = {name: sum(each[name] for each, _ in every) for name in calls}
            found["seconds"] = sum(each for _, each in every)
            torch.save(found, _place(folder, side, row))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _calls(side: str) -> dict[str, int]:
    """Return how often the seams of each active overlay were called on this rank."""
    found: dict[str, int] = {}
    if side == OURS:
        for record in megacpp_overlays.audit().records:
            if record.decision.value == "active":
                found[record.overlay.id] = found.get(record.overlay.id, 0) + sum(number for _, number in record.calls)
    return found


def main() -> None:
    """Run what is asked for."""
    logging.disable(logging.ERROR)
    folder, sides, *names = Path(sys.argv[1]), sys.argv[2].split(","), *sys.argv[3:]
    prepare()
    import differential.steps  # noqa: F401 - once, before the copies

    rows = [row for row in ROWS if not names or row.name in names]
    for side in sides:
        run(side, rows, folder)
    if OURS in sides:
        (folder / "audit.json").write_text(json.dumps(megacpp_overlays.audit().as_dict()))


if __name__ == "__main__":
    main()
