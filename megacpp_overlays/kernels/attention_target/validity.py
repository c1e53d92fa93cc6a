"""Valid keys of each query: row bounds, and a mask or a support where bounds do not describe all of it.

From any of the caller's arguments kernels get the first valid key of a row and the one behind the last, so they can skip the
keys outside. Nothing here waits for the device, so the code can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_ALIGNMENT = 16
"""Bytes that are loaded at once: rows begin where a load may."""


class Validity(NamedTuple):
    """Valid keys of each query: a key must lie within the bounds, and `mask` and `allowed`, where present, must allow it."""

    keys: int
    starts: torch.Tensor
    """(1 or batch, queries), int32: the first key that may be valid."""
    ends: torch.Tensor
    """The one behind the last."""
    mask: torch.Tensor | None = None
    """(1 or batch, queries, keys), float32, added to the scores; a key whose entry is not finite is not valid."""
    mask_matters: torch.Tensor | None = None
    """(), int32: 0 where the mask adds nothing within the bounds and hides nothing there, so that they say it all."""
    allowed: torch.Tensor | None = None
    """(1 or batch, queries, keys), bool."""

    def of_rows(self, rows: slice) -> torch.Tensor:
        """Return which keys are valid for some queries: (1 or batch, rows, keys), bool."""
        place = torch.arange(self.keys, dtype=torch.int32, device=self.starts.device)
        valid = (place >= self.starts[:, rows, None]) & (place < self.ends[:, rows, None])
        if self.mask is not None:
            valid = valid & self.mask[:, rows].isfinite()
        return valid if self.allowed is None else valid & self.allowed[:, rows]

    def mask_of_rows(self, rows: slice) -> torch.Tensor | None:
        """Return the part of the mask that is added to the scores of some queries."""
        return None if self.mask is None else self.mask[:, rows]


def validity(
    queries: int,
    keys: int,
    starts: torch.Tensor | None,
    ends: torch.Tensor | None,
    key_positions: torch.Tensor | None,
    mask: torch.Tensor | None,
    topk_indices: torch.Tensor | None,
) -> Validity:
    """Return the valid keys that the arguments of `attention_target.target` describe together.

    Raises:
        ValueError: there are neither bounds nor a mask, or their sizes are wrong.
    """
    if mask is not None:
        if mask.ndim not in (2, 3) or mask.shape[-2:] != (queries, keys) or starts is not None:
            raise ValueError(f"mask must be ([batch,] queries, keys), without bounds, not {tuple(mask.shape)}")
        mask = mask.float() if mask.ndim == 3 else mask.float().unsqueeze(0)
        finite = mask.isfinite()
        starts, ends = _bounds(finite)
        hides = (finite.sum(dim=-1, dtype=torch.int32) != ends - starts).any()
        matters = hides | (finite & (mask != 0)).any()
        found = Validity(keys, starts, ends, mask=mask, mask_matters=matters.to(torch.int32))
    elif starts is None or ends is None or (starts.shape, ends.shape) != ((queries,), (queries,)):
        raise ValueError("a mask is needed, or starts and ends of shape (queries,)")
    elif key_positions is None:
        # Bounds may lie far outside, as int64 positions of a whole job: within int32 they are clamped first.
        found = Validity(keys, *(each.clamp(0, keys).to(torch.int32).unsqueeze(0) for each in (starts, ends)))
    elif key_positions.shape != (keys,):
        raise ValueError(f"key_positions must be (keys,), not {tuple(key_positions.shape)}")
    else:
        allowed = ((key_positions >= starts[:, None]) & (key_positions < ends[:, None])).unsqueeze(0)
        found = Validity(keys, *_bounds(allowed), allowed=allowed)
    if topk_indices is None:
        return found
    support = _support(topk_indices, keys)
    return found._replace(allowed=support if found.allowed is None else support & found.allowed)


def _bounds(valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first valid key of each row and the one behind the last; 0 and 0 where there is none."""
    keys = valid.size(-1)
    if keys == 0:
        nothing = torch.zeros(valid.shape[:2], dtype=torch.int32, device=valid.device)
        return nothing, nothing
    numbers = valid.to(torch.uint8)
    any_valid = numbers.amax(dim=-1) > 0
    starts = numbers.argmax(dim=-1)
    ends = keys - numbers.flip(-1).argmax(dim=-1)
    nothing = torch.zeros((), dtype=starts.dtype, device=valid.device)
    first, behind = (torch.where(any_valid, each, nothing).to(torch.int32) for each in (starts, ends))
    return first, behind


def _support(topk_indices: torch.Tensor, keys: int) -> torch.Tensor:
    """Return which keys were chosen: (batch, queries, keys), bool. A negative index chooses none.

    Those go to a column behind the keys, so that no two writes to one place differ.
    """
    batch, queries, _ = topk_indices.shape
    aligned = (keys // _ALIGNMENT + 1) * _ALIGNMENT
    chosen = torch.zeros((batch, queries, aligned), dtype=torch.bool, device=topk_indices.device)
    places = topk_indices.to(torch.int64)
    return chosen.scatter_(-1, torch.where(places < 0, keys, places), True)[..., :keys]
