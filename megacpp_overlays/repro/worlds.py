"""Worlds of gloo ranks for neighbour cases: forked processes that meet through a folder and return numbers."""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

from megacpp_overlays.errors import OverlayError
from megacpp_overlays.repro.neighbour import flat

LIMIT_S = 300
"""Time limit of one world."""

STACK_S = 10
"""Longest wait for the stack of a rank that is late."""


_inherited: list[dict[str, object]] = []
"""Contents of modules at the start of a rank, kept so that the objects stay alive until it ends."""


class RankError(OverlayError):
    """Raised when a rank ended in an error; the text is its last line."""


def on_ranks(count: int, run: Callable[[int], Mapping[str, object]]) -> dict[str, list[float]]:
    """Run a function on each rank of a world of its own, and return the numbers of all ranks, `rank 0, loss` and so on.

    torch, and every module of upstream that is slow to import, should be loaded before: ranks are copies of this process.

    Args:
        count: number of ranks.
        run: gets the rank; `torch.distributed` is initialised, Megatron's groups are not.

    Raises:
        RankError: a rank ended in an error, or not in time. For a late rank the text has its Python stack.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, count, run, folder)) for rank in range(count)]
        for each in ranks:
            each.start()
        ends = time.monotonic() + LIMIT_S
        for each in ranks:
            each.join(max(0.0, ends - time.monotonic()))
        if late := [number for number, each in enumerate(ranks) if each.is_alive()]:
            stood = {number: _stack(ranks[number], Path(folder, f"{number}.stack")) for number in late}
            for each in ranks:
                each.kill()
            where = "\n".join(f"rank {number} stood at\n{lines}" for number, lines in stood.items())
            raise RankError(f"rank {late[0]} did not end within {LIMIT_S} s\n{where}")
        found: dict[str, list[float]] = {}
        for rank in range(count):
            answer = Path(folder, str(rank))
            if not answer.exists():
                raise RankError(f"rank {rank} ended without an answer")
            said = json.loads(answer.read_text())
            if "error" in said:
                raise RankError(f"rank {rank}: {said['error']}")
            found |= {f"rank {rank}, {name}": numbers for name, numbers in said["numbers"].items()}
    return found


def _stack(rank: BaseProcess, file: Path) -> str:
    """Return the Python stacks of a rank's threads, the innermost call first."""
    if rank.pid is None or not file.exists():
        return "its start"
    os.kill(rank.pid, signal.SIGUSR1)
    text, ends = "", time.monotonic() + STACK_S
    while rank.is_alive() and time.monotonic() < ends:
        time.sleep(0.1)
        before, text = text, file.read_text().rstrip()
        if text and text == before:
            break
    return text or "an unknown line"


def _rank(rank: int, count: int, run: Callable[[int], Mapping[str, object]], folder: str) -> None:
    import torch

    torch.set_num_threads(1)
    _keep_inherited_groups()
    answer = Path(folder, str(rank))
    with answer.with_suffix(".stack").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        _answer(rank, count, run, folder, answer)
        faulthandler.unregister(signal.SIGUSR1)


def _answer(rank: int, count: int, run: Callable[[int], Mapping[str, object]], folder: str, answer: Path) -> None:
    import torch

    try:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count)
        said: dict[str, object] = {"numbers": {name: list(flat(value)) for name, value in run(rank).items()}}
    except Exception as error:  # noqa: BLE001 - it is raised by the process that waits
        traceback.print_exc()
        said = {"error": f"{type(error).__name__}: {error}"}
    answer.with_suffix(".part").write_text(json.dumps(said))
    answer.with_suffix(".part").rename(answer)
    if "error" in said:
        os._exit(1)  # others that wait for it see its connection close
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _keep_inherited_groups() -> None:
    """Keep the process groups of the parent process alive: the destructor of a group waits for its threads, which a fork does not have.

    Some are in garbage that was not collected yet. Megatron's `destroy_model_parallel` leaves some in its globals, and the next
    `initialize_model_parallel` drops them.
    """
    gc.freeze()
    if (state := sys.modules.get("megatron.core.parallel_state")) is not None:
        _inherited.append(dict(vars(state)))
