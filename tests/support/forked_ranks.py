"""Ranks of gloo as forked copies of a process that has imported what they need, each with what it found."""

from __future__ import annotations

import datetime
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = datetime.timedelta(minutes=10)


def on_ranks(count: int, folder: Path, find: Callable[[int], Any]) -> list[Any]:
    """Return what each rank found, as JSON brings it back.

    Args:
        count: how many ranks.
        folder: where they meet and leave what they found.
        find: called with its number on each rank, in the process group of all of them.
    """

    def rank(number: int) -> None:
        import torch

        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/meet", rank=number, world_size=count, timeout=PATIENCE
        )
        (folder / f"{number}.json").write_text(json.dumps(find(number)))
        torch.distributed.destroy_process_group()

    context = multiprocessing.get_context("fork")
    started = [context.Process(target=rank, args=(number,)) for number in range(count)]
    for each in started:
        each.start()
    for each in started:
        each.join()
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(count)]
