"""Measurements of the attention target's tensor-core kernels in Triton's interpreter, as JSON.

    TRITON_INTERPRET=1 python tests/support/attention_target_facts.py [few]

Run it in a fresh interpreter. With `few` it measures two of the sizes and every third kind of valid keys.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import torch
from attention_target_cases import SIZES, VALID, inputs, seen, share, valid_of

from megacpp_overlays.kernels.attention_target import function as attention_target
from megacpp_overlays.kernels.attention_target import in_triton

if "few" in sys.argv:
    SIZES = {name: SIZES[name] for name in ("odd", "one of each")}
    VALID = VALID[::3]
SMALL = (40, 70, 2, 3, 32)


def shares() -> dict[str, float]:
    """Return the error of each case as a share of the allowed error.

    In bfloat16 two sizes have every kind of valid keys, and the others every fourth kind. One further size has every kind in
    float16 and with one head of keys, and another in large tiles.
    """
    found = {}
    for name, sizes in SIZES.items():
        for kind in VALID if name in {"odd", "one of each"} else VALID[::4]:
            found[f"{name}, {kind}"] = _share(sizes, kind)
    for kind in VALID:
        found[f"float16, {kind}"] = _share(SMALL, kind, dtype=torch.float16)
        found[f"one head of keys, {kind}"] = _share(SMALL, kind, key_heads=1)
    with mock.patch.object(in_triton, "_has_room", return_value=True):
        for kind in VALID:
            found[f"large tiles, {kind}"] = _share((140, 150, 1, 2, 64), kind)
    return found


def _share(sizes: tuple[int, ...], kind: str, **how: Any) -> float:
    query, key = inputs(1, *sizes, **how)
    valid = valid_of(kind, *sizes[:3])
    scale = sizes[4] ** -0.5
    found = attention_target.target(query, key, scale, **valid)
    assert (found.dtype, found.is_contiguous()) == (torch.float32, True)
    return share(found, query, key, scale, valid)


def layouts() -> dict[str, bool]:
    """Return whether inputs of other strides, and a second run, give the same bits."""
    query, key = inputs(2, *SMALL)
    valid = valid_of("mask of each batch", *SMALL[:3])
    expected = attention_target.target(query, key, 0.2, **valid)
    strided = {
        "batch first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        "every other of dim": lambda x: torch.stack([x, x + 1], dim=-1).flatten(-2)[..., ::2],
        "slices of rows": lambda x: torch.stack([x, x + 1], dim=1).flatten(0, 1)[::2],
        "heads outermost": lambda x: x.movedim(2, 0).contiguous().movedim(0, 2),
    }
    found = {
        name: torch.equal(attention_target.target(lay_out(query), lay_out(key), 0.2, **valid), expected)
        for name, lay_out in strided.items()
    }
    mask = valid["mask"].transpose(1, 2).contiguous().transpose(1, 2)
    found["mask"] = torch.equal(attention_target.target(query, key, 0.2, mask=mask), expected)
    found["again"] = torch.equal(attention_target.target(query, key, 0.2, **valid), expected)
    return found


def spoilt() -> dict[str, bool]:
    """Return whether a NaN in a query or key spoils exactly the rows that see it, and invalid keys stay 0."""
    found = {}
    for name, place in (("query", 0), ("key", 1)):
        pair = inputs(3, *SMALL)
        pair[place][5, 1, 2, 7] = torch.nan
        result = attention_target.target(*pair, 0.2, **valid_of("causal", *SMALL[:3]))
        rows = result.isnan().any(dim=-1)
        expected = torch.zeros_like(rows)
        expected[1, 5 if name == "query" else slice(5, None)] = True
        expected[1, 5:6] = True
        found[name] = torch.equal(rows, expected)
        found[f"{name}, elsewhere"] = not bool(result[~seen(valid_of("causal", *SMALL[:3]), *SMALL[:3])].any())
    return found


def nothing() -> dict[str, bool]:
    """Return whether inputs without elements give zeros of the right shape, and a mask without a valid key gives zeros."""
    found = {}
    for place in range(4):
        sizes = [0 if at == place else size for at, size in enumerate(SMALL)]
        query, key = inputs(4, *sizes)
        valid = {"starts": torch.zeros(sizes[0], dtype=torch.int64), "ends": torch.full((sizes[0],), 9)}
        result = attention_target.target(query, key, 0.2, **valid)
        found[f"axis {place}"] = tuple(result.shape) == (sizes[2], sizes[0], sizes[1]) and not bool(result.any())
    query, key = inputs(5, *SMALL)
    found["no valid key"] = not bool(
        attention_target.target(query, key, 0.2, mask=torch.full(SMALL[:2], -torch.inf)).any()
    )
    return found


def extremes() -> dict[str, bool]:
    """Return whether extreme inputs give the right target.

    With large scores, or a mask of the lowest float32 number, each row sums to the number of heads. A mask of -3.4e38 for later
    keys gives the target of causal bounds, to 1e-6. Bounds far outside the keys give the bits of bounds at the first and last key.
    """
    query, key = inputs(6, *SMALL)
    causal = valid_of("causal", *SMALL[:3])
    large = attention_target.target(100 * query, key, 1.0, **causal)
    low = torch.zeros(SMALL[:2]).masked_fill(torch.arange(SMALL[1]) > torch.arange(SMALL[0])[:, None], -3.4e38)
    lowest = torch.full(SMALL[:2], torch.finfo(torch.float32).min)
    far = {"starts": causal["starts"] - 2**40, "ends": causal["ends"] + 2**40}
    everything = {"starts": causal["starts"], "ends": torch.full_like(causal["ends"], SMALL[1])}
    return {
        "large scores": bool(large.isfinite().all()) and bool((large.sum(dim=-1) - SMALL[3]).abs().max() < 1e-5),
        "low masks": torch.allclose(
            attention_target.target(query, key, 0.2, mask=low),
            attention_target.target(query, key, 0.2, **causal),
            atol=1e-6,
        ),
        "rows of the lowest number": bool(
            (attention_target.target(query, key, 0.2, mask=lowest).sum(dim=-1) - SMALL[3]).abs().max() < 1e-5
        ),
        "far bounds": torch.equal(
            attention_target.target(query, key, 0.2, **far), attention_target.target(query, key, 0.2, **everything)
        ),
    }


def main() -> None:
    """Print the measurements, and the name of the selected implementation."""
    way = attention_target.implementation(torch.bfloat16, torch.bfloat16, 128, torch.device("cpu")).__name__
    found = {
        "way": way, "shares": shares(), "layouts": layouts(), "spoilt": spoilt(),
        "nothing": nothing(), "extremes": extremes(),
    }  # fmt: skip
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
