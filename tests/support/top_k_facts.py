"""Run in a fresh interpreter under TRITON_INTERPRET=1: facts about the choices of the top-k kernel, as JSON.

Each fact says by the name of a case whether the choice is the expected one.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import torch
from top_k_cases import DTYPES, KINDS, definition, rows, some_of

from megacpp_overlays.kernels.top_k import function as top_k
from megacpp_overlays.kernels.top_k import in_torch, in_triton

FEW = "few" in sys.argv
KEYS = (2, 33, 128) if FEW else (1, 2, 33, 128, 700)
"""Of one warp and of two, one part of a row and several, powers of two and others."""


def kinds() -> dict[str, bool]:
    """Hold every kind of rows to the definition."""
    return {
        f"{kind}, {keys} keys, {k}": _is_right(rows(kind, 2, keys), k)
        for kind in KINDS
        for keys in KEYS
        for k in some_of(keys)
    }


def dtypes() -> dict[str, bool]:
    """Hold half precision to the definition."""
    return {f"{dtype}, {kind}": _is_right(rows(kind, 2, 150, dtype=dtype), 60) for dtype in DTYPES for kind in KINDS}


def long_rows() -> dict[str, bool]:
    """Hold rows of several warps to sorting."""
    return {
        f"{kind}, {keys} keys": torch.equal(top_k.choose(scores, keys // 2), in_torch.choose(scores, keys // 2, False))
        for keys in ((4096,) if FEW else (4096, 5000, 8192, 32768))
        for kind in ("normal", "whole", "NaNs")
        for scores in [rows(kind, 1, keys)]
    }


def layouts() -> dict[str, bool]:
    """Return whether other strides give the same."""
    scores = rows("whole", 2, 3, 140)
    expected = definition(scores, 50)
    strided: dict[str, Any] = {
        "rows first": scores.transpose(0, 1).contiguous().transpose(0, 1),
        "every other number": torch.stack([scores, scores + 9], dim=-1).flatten(-2)[..., ::2],
        "a part of longer rows": torch.cat([scores + 9, scores, scores + 9], dim=-1)[..., 140:280],
        "numbers outermost": scores.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    }
    found = {name: torch.equal(top_k.choose(each, 50), expected) for name, each in strided.items()}
    one = scores[:, :1].expand(2, 3, 140)
    found["one row for all"] = torch.equal(top_k.choose(one, 50), definition(one, 50))
    found["one axis"] = torch.equal(top_k.choose(scores[0, 0], 50), expected[0, 0])
    found["scores are left alone"] = torch.equal(scores, rows("whole", 2, 3, 140))
    return found


def nothing() -> dict[str, bool]:
    """Return whether there may be no rows and no numbers."""
    return {
        str(shape): tuple(top_k.choose(torch.zeros(shape), k).shape) == (*shape[:-1], k)
        for shape, k in (((0, 3), 2), ((2, 0), 0), ((2, 0, 5), 5), ((3, 4), 0))
    }


def stretches() -> dict[str, bool]:
    """Hold rows that are cut into stretches of 64 numbers to the definition: up to three levels of lists."""
    found = {}
    with mock.patch.object(in_triton, "_STRETCH", 64):
        for kind in KINDS[::2] if FEW else KINDS:
            for keys, k in ((65, 32), (200, 20)) if FEW else ((65, 32), (128, 1), (200, 20), (333, 32)):
                found[f"{kind}, {keys} keys, {k}"] = _is_right(rows(kind, 2, keys), k)
    return found


def bounds() -> dict[str, bool]:
    """Hold rows with bounds to a mask: of none and of one number, next to groups that are loaded at once, and of several stretches."""
    starts = torch.tensor([0, 5, 17, 40, 3], dtype=torch.int32)
    ends = torch.tensor([100, 6, 33, 40, 70], dtype=torch.int32)
    found = {}
    for stretch in (64, in_triton._STRETCH):
        with mock.patch.object(in_triton, "_STRETCH", stretch):
            for kind in ("whole", "NaNs", "infinities"):
                for keys in (100, 128):
                    scores = rows(kind, 2, 5, keys)
                    mine = in_triton.choose(scores, 24, True, (starts, ends))
                    expected = in_torch.choose(scores, 24, True, (starts, ends))
                    found[f"{kind}, {keys} keys, stretches of {stretch}"] = torch.equal(mine, expected)
    return found


def _is_right(scores: Any, k: int) -> bool:
    found = [top_k.choose(scores, k, mark_infinite=marked) for marked in (False, True)]
    return all(torch.equal(each, definition(scores, k, mark_infinite=marked)) for marked, each in enumerate(found))


def main() -> None:
    """Print the facts."""
    way = top_k.implementation(torch.float32, 100, 1, torch.device("cpu")).__name__
    facts = {each.__name__: each() for each in (kinds, dtypes, long_rows, layouts, nothing, stretches, bounds)}
    sys.stdout.write(json.dumps({"way": way, **facts}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
