"""Sort of slots by key: the slots of a key are adjacent and keep their order."""

from __future__ import annotations

import torch

from megacpp_overlays.kernels.sparse_attention import device_code

_KEYS_OF_16_BITS = 1 << 16


def sorted_slots(indices: torch.Tensor, keys: int, start: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots of some rows in the order of their keys, and where those of each key start, one more at the end.

    Args:
        indices: (batch, queries, slots), integers, the last axis of unit stride; an index that is no key is no choice. A row is a
            query of a batch element, query * batch + element. Slots are ordered by the row of their key, (keys, batch).
        keys: of a batch element, fewer than 2**31 in all.
        start: the first row.
        rows: how many.

    Returns:
        (rows * slots,), int64, and (keys * batch + 1,), int64.
    """
    batch, _, slots = indices.shape
    # A sort takes as long as its numbers have bits.
    is_short = keys * batch < _KEYS_OF_16_BITS
    offset, dtype = (1 << 15, torch.int16) if is_short else (0, torch.int32)
    places = torch.empty((rows, slots), dtype=dtype, device=indices.device)
    device_code.place_slots[(rows,)](
        *(indices, places, start, batch, keys, slots, offset, *indices.stride()[:2]), SLOTS=1024
    )
    ordered, order = torch.sort(places.view(-1), stable=True)
    every = torch.arange(-offset, keys * batch + 1 - offset, device=indices.device, dtype=dtype)
    return order, torch.searchsorted(ordered, every)
