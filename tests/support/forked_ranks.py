"""Ranks as forked copies of a process that has imported their modules, each with its result.

They meet with gloo and have their tensors on the CPU. With RANKS_ON=cuda they meet with NCCL, and each has a device: then the process
that is copied must not have touched one. Where there are fewer devices than ranks, ranks share them, and NCCL_HOSTID gives each its own
host: NCCL refuses two ranks of one host on one device.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEVICE = os.environ.get("RANKS_ON", "cpu")
ON_CPU = DEVICE == "cpu"
PATIENCE = datetime.timedelta(minutes=10 if ON_CPU else 1)


def at_most(ranks: int) -> int:
    """Return so many ranks, or one for each device if these are fewer, and two at least, which share one if they have to."""
    import torch

    return ranks if ON_CPU else min(ranks, max(2, torch.cuda.device_count()))  # it asks NVML, and touches no device


def bits(*results: Any) -> str:
    """Return a hash of tensors."""
    return hashlib.sha256(b"".join(each.contiguous().cpu().numpy().tobytes() for each in results)).hexdigest()[:16]


def on_ranks(count: int, folder: Path, find: Callable[[int], Any]) -> list[Any]:
    """Return the result of each rank, as JSON brings it back.

    Args:
        count: how many ranks.
        folder: where they meet and leave their results.
        find: called with its number on each rank, in the process group of all of them.
    """

    def rank(number: int) -> None:
        import torch

        torch.set_num_threads(torch.get_num_threads())  # a copy makes its pool anew, which fails on two threads at once
        if not ON_CPU:
            devices = torch.cuda.device_count()
            torch.cuda.set_device(number % devices)
            if devices < count:
                os.environ |= {"NCCL_HOSTID": f"rank{number}", "NCCL_SOCKET_IFNAME": "lo"}
        torch.distributed.init_process_group(
            "gloo" if ON_CPU else "nccl",
            init_method=f"file://{folder}/meet",
            rank=number,
            world_size=count,
            timeout=PATIENCE,
        )
        (folder / f"{number}.json").write_text(json.dumps(find(number)))
        if ON_CPU:  # who leaves first closes connections on which another rank may be about to send
            torch.distributed.barrier()
        torch.distributed.destroy_process_group()

    folder.mkdir(exist_ok=True)
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=rank, args=(number,)) for number in range(count)]
    for each in started:
        each.start()
    for each in started:
        each.join()
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(count)]
