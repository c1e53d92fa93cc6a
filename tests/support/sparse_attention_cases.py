"""Attention over chosen keys, over sizes, dtypes and layouts: facts for the tests, as JSON.

    python sparse_attention_cases.py DEVICE     every entry of the grid

On `cpu`, with TRITON_INTERPRET=1, the kernels run in Triton's interpreter, which cuts bfloat16 instead of rounding it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from typing import Any, NamedTuple

import torch

from megacpp_overlays.kernels.sparse_attention import function, reference
from megacpp_overlays.kernels.sparse_attention.quantized_keys import BLOCK, QuantizedKeys


class Entry(NamedTuple):
    """One problem."""

    queries: int
    batch: int
    heads: int
    dim: int
    keys: int
    slots: int
    value: int
    sink: bool = False
    bias: bool = False
    indices: torch.dtype = torch.int64
    dtype: torch.dtype = torch.float16
    strided: bool = False
    parts: bool = False
    """Whether buffers are so small that rows come in several parts, and few keys already want more than 16 bits."""
    scales: str = ""
    """Whether keys are FP8 numbers, and what has a scale: `all`, each `key`, or `blocks` of channels."""


GRID = {
    "smallest": Entry(2, 1, 1, 16, 3, 2, 16),
    "two parts of channels": Entry(4, 2, 3, 80, 20, 15, 64),
    "values in both parts": Entry(3, 1, 5, 48, 20, 17, 40, indices=torch.int32),
    "values fill a key": Entry(3, 1, 4, 96, 20, 17, 96, sink=True),
    "a sink and a bias": Entry(4, 2, 3, 24, 11, 7, 16, sink=True, bias=True),
    "two blocks of heads": Entry(2, 1, 66, 16, 9, 8, 16, sink=True),
    "tiles that the copy engine brings": Entry(2, 1, 64, 24, 10, 128, 16),
    "more slots than keys": Entry(3, 1, 4, 32, 5, 70, 16),
    "strided inputs": Entry(3, 2, 4, 48, 30, 20, 32, strided=True, bias=True),
    "rows in several parts": Entry(7, 2, 4, 48, 30, 20, 32, parts=True),
    "bfloat16": Entry(4, 1, 16, 80, 40, 33, 64, sink=True, dtype=torch.bfloat16),
    "a scale for all keys": Entry(3, 2, 4, 80, 20, 15, 64, sink=True, scales="all"),
    "a scale for each key": Entry(4, 2, 3, 48, 11, 17, 40, bias=True, scales="key"),
    "a scale for each key, one part of channels": Entry(3, 1, 4, 32, 5, 70, 32, indices=torch.int32, scales="key"),
    "scales of blocks": Entry(2, 2, 4, 320, 12, 7, 256, scales="blocks"),
    "scales of blocks that parts cut": Entry(2, 1, 3, 140, 12, 7, 16, scales="blocks"),
    "scales of one block": Entry(3, 1, 3, 96, 12, 7, 96, scales="blocks"),
    "scales of blocks, values in both parts": Entry(2, 1, 3, 300, 9, 7, 290, strided=True, scales="blocks"),
    "scales, bfloat16": Entry(4, 1, 16, 160, 20, 33, 128, scales="blocks", dtype=torch.bfloat16),
}


def inputs(entry: Entry, seed: int = 0, device: str = "cpu") -> dict[str, Any]:
    """Return what `attend` takes, and gradients of both results: some slots hold nothing, and the first query chose nothing."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        wide = torch.randn((*shape[:-1], 2 * shape[-1] if entry.strided else shape[-1]), generator=generator)
        return wide.to(entry.dtype).to(device)[..., :: 2 if entry.strided else 1]

    candidates = max(entry.keys, entry.slots) + 3
    rows = [torch.randperm(candidates, generator=generator)[: entry.slots] for _ in range(entry.batch * entry.queries)]
    indices = torch.stack(rows).view(entry.batch, entry.queries, entry.slots)
    indices[:, 0] = -1
    key = normal(entry.keys, entry.batch, 1, entry.dim)
    made: dict[str, Any] = {
        "query": normal(entry.queries, entry.batch, entry.heads, entry.dim),
        "key": quantized(key, entry) if entry.scales else key,
        "indices": indices.to(entry.indices).to(device),
        "scale": entry.dim**-0.5,
        "value_channels": entry.value,
        "sink": torch.randn(entry.heads, generator=generator).to(device) if entry.sink else None,
        "bias": torch.randn(indices.shape, generator=generator).to(device) if entry.bias else None,
    }
    above = normal(entry.queries, entry.batch, entry.heads, entry.value)
    above_lse = torch.randn((entry.queries, entry.batch, entry.heads), generator=generator).to(device)
    return {"given": made, "above": above, "above_lse": above_lse}


def quantized(key: torch.Tensor, entry: Entry) -> QuantizedKeys:
    """Return keys as FP8 numbers of up to 448, most of them normal; scales of blocks lie as Transformer Engine has them."""
    wide = key.float()
    if entry.scales == "all":
        scale = (wide.abs().amax() / 448).reshape(1)
        over = scale
    elif entry.scales == "key":
        over = wide.abs().amax(dim=3, keepdim=True) / 448
        scale = over[:, :, 0, 0]
    else:
        parts = [part.abs().amax(dim=(2, 3)) / 448 for part in wide.split(BLOCK, dim=3)]
        scale = torch.stack(parts).movedim(0, 2)
        over = scale.repeat_interleave(BLOCK, dim=2)[:, :, None, : entry.dim]
    data = (wide / over).to(torch.float8_e4m3fn)
    if entry.strided:
        data = data.view(torch.uint8).repeat_interleave(2, dim=3)[..., ::2]
    return QuantizedKeys(data, scale)


def results(attend: Any, made: dict[str, Any], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Return both results and all gradients, computed from the inputs as they are or as another dtype."""
    given = dict(made["given"])
    learned = {}
    for name in ("query", "key", "sink"):
        if isinstance(given[name], QuantizedKeys):
            keys = given[name]
            learns = given["query"].dtype  # the dtype that was asked for: queries come first
            learned[name] = (
                torch.zeros((), dtype=learns, device=keys.data.device).expand(keys.data.shape).requires_grad_()
            )
            given[name] = dataclasses.replace(keys, gradient_for=learned[name])
        elif given[name] is not None:
            leaf = given[name].detach().to(dtype or given[name].dtype)
            learned[name] = given[name] = leaf.requires_grad_()
    output, lse = attend(**given)
    finite = torch.isfinite(lse)
    above = (output * made["above"].to(output.dtype)).sum()
    above = above + (lse.masked_fill(~finite, 0.0) * made["above_lse"].to(lse.dtype)).sum()
    gradients = torch.autograd.grad(above, list(learned.values()))
    found = {"output": output.detach(), "lse": lse.detach().masked_fill(~finite, 0.0), "finite": finite}
    return found | {f"of {name}": each for name, each in zip(learned, gradients, strict=True)}


def as_opened(made: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return results for the keys that quantized ones stand for, in the dtype of queries; nothing where keys are plain."""
    given = made["given"]
    if not isinstance(given["key"], QuantizedKeys):
        return {}
    plain = given | {"key": given["key"].opened(given["query"].dtype)}
    return results(function.attend, made | {"given": plain}, None)


def errors(found: dict[str, torch.Tensor], true: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the Euclidean norm of each difference over that of the truth."""
    return {
        name: float((found[name].double() - each.double()).norm() / each.double().norm().clamp_min(1e-30))
        for name, each in true.items()
    }


def main(device: str) -> None:
    """Print a line for each entry: its name, the module that computed, errors, and whether a rerun gave the same bits."""
    for name, entry in GRID.items():
        made = inputs(entry, device=device)
        module = function.implementation(entry.dtype, entry.dtype, entry.dim, made["above"].device)
        if entry.parts:
            module._SLOT_BYTES, module._KEPT_BYTES, module._KEYS_OF_16_BITS = 3000, 20000, 0
        opened = results(function.attend, made, None)
        module._READS_WORTH_OPENING = math.inf  # else no key is read as it is here, where few keys are read often
        found, again = (results(function.attend, made, None) for _ in range(2))
        module._READS_WORTH_OPENING = 0
        true = results(reference.attend, made, torch.float64)
        facts = {
            "errors": errors(found, true),
            "as opened": all(
                torch.equal(each, some[what]) for what, each in as_opened(made).items() for some in (found, opened)
            ),
            "again": all(torch.equal(each, again[what]) for what, each in found.items()),
            "module": module.__name__.rpartition(".")[2],
        }
        print(json.dumps({name: facts}), flush=True)  # noqa: T201 - read by the tests


if __name__ == "__main__":
    main(sys.argv[1])
