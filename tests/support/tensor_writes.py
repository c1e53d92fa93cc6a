"""Ways to write new numbers into a tensor of int32 or of another dtype on the CPU, most of which PyTorch does not count."""

from __future__ import annotations

import copy
import datetime
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from places import HANG_S

Write = Callable[[torch.Tensor, torch.Tensor], object]
Copy = Callable[[torch.Tensor], torch.Tensor]


def _by_other_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    tensor.data = new.clone()


def _through_numpy(tensor: torch.Tensor, new: torch.Tensor) -> None:
    tensor.numpy()[:] = new.numpy()


def _by_a_broadcast(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Receive from another rank of this process."""
    store, limit = torch.distributed.HashStore(), datetime.timedelta(seconds=HANG_S)

    def connected(rank: int) -> torch.distributed.ProcessGroupGloo:
        return torch.distributed.ProcessGroupGloo(store, rank, 2, limit)

    with ThreadPoolExecutor() as ranks:  # each waits for the other one
        groups = list(ranks.map(connected, range(2)))
    # From one thread, which keeps groups and works until both are done: ranks that broadcast in threads of their own have ended in a segmentation fault.
    works = [
        group.broadcast([each], torch.distributed.BroadcastOptions())
        for group, each in zip(groups, (new, tensor), strict=True)
    ]
    for each in works:
        each.wait()


WRITES: dict[str, Write] = {
    "in place": torch.Tensor.copy_,
    "through data": lambda tensor, new: tensor.data.copy_(new),
    "by other data": _by_other_data,
    "through NumPy": _through_numpy,
    "through DLPack": lambda tensor, new: torch.from_dlpack(tensor).copy_(new),
    "through its storage": lambda tensor, new: tensor.untyped_storage().copy_(new.untyped_storage()),
    "by a broadcast": _by_a_broadcast,
}


def _saved_and_loaded(tensor: torch.Tensor) -> torch.Tensor:
    torch.save(tensor, file := io.BytesIO())
    file.seek(0)
    loaded: torch.Tensor = torch.load(file, weights_only=True)
    return loaded


COPIES: dict[str, Copy] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda tensor: pickle.loads(pickle.dumps(tensor)),
    "torch.save": _saved_and_loaded,
}
