"""Which slots hold a key, in their order: sorted, so that whoever adds up what they hold adds in one order."""

from __future__ import annotations

import torch

_KEYS_OF_16_BITS = 1 << 16


def places(indices: torch.Tensor, keys: int) -> torch.Tensor:
    """Return (rows, slots): which row of the keys, (keys * batch), a slot holds, and keys * batch for none.

    Args:
        indices: (batch, queries, slots), integers; what is no key is no choice. A row is a query of a batch element.
        keys: of a batch element, fewer than 2**31 in all.
    """
    batch = indices.size(0)
    elements = torch.arange(batch, device=indices.device)[:, None, None]
    chosen = (indices >= 0) & (indices < keys)
    found = torch.where(chosen, indices * batch + elements, keys * batch)
    # A sort takes as long as its numbers have bits.
    found = (found - (1 << 15)).to(torch.int16) if keys * batch < _KEYS_OF_16_BITS else found.to(torch.int32)
    return found.transpose(0, 1).reshape(-1, indices.size(2))


def sort(places: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots in the order of their keys, and where those of each key start, one more at the end."""
    sorted_places, order = torch.sort(places.reshape(-1), stable=True)
    first = -(1 << 15) if places.dtype == torch.int16 else 0
    every = torch.arange(first, first + keys + 1, device=places.device).to(places.dtype)
    return order, torch.searchsorted(sorted_places, every)
