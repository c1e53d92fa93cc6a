"""Attention over chosen keys, over sizes, dtypes and layouts: facts for the tests, as JSON.

    python sparse_attention_cases.py DEVICE         every entry of both grids
    python sparse_attention_cases.py DEVICE few     one for each path

On `cpu`, with TRITON_INTERPRET=1, the kernels run in Triton's interpreter, which cuts bfloat16 instead of rounding it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from typing import Any, NamedTuple

import torch

from megacpp_overlays.kernels.sparse_attention import function, reference, slot_order, tiles
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
    """The scales of FP8 keys: `all` for one scale of all keys, each `key`, or `blocks` of channels; "" for keys that are not FP8."""
    sharpness: float = 1.0
    """How many times queries are larger than normal numbers: the larger, the fewer keys share a row."""
    ahead: float = 0.0
    """By how much the score of one slot exceeds the log-sum-exp of all others, for each query and head; 0 for as it comes."""
    common: float = 0.0
    """How large a part of its values is that all keys have in common."""


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
    "more heads than one tile": Entry(2, 2, 18, 48, 20, 10, 32),
    "whole tiles of heads and slots": Entry(2, 1, 64, 16, 140, 128, 16, strided=True),
    "scales, bfloat16": Entry(4, 1, 16, 160, 20, 33, 128, scales="blocks", dtype=torch.bfloat16),
}

PEAKED = {
    "queries x 4": Entry(10, 1, 8, 80, 40, 30, 64, sharpness=4),
    "queries x 16": Entry(10, 1, 8, 80, 40, 30, 64, sharpness=16),
    "queries x 64": Entry(10, 1, 8, 80, 40, 30, 64, sharpness=64),
    "a key with 98%": Entry(4, 1, 8, 80, 40, 30, 64, ahead=4),
    "a key with 99.9%": Entry(4, 1, 8, 80, 40, 30, 64, ahead=7),
    "a key with nearly all, values in both parts": Entry(4, 2, 5, 48, 30, 20, 40, ahead=9),
    "a key with 99.9%, a sink and a bias": Entry(4, 1, 16, 48, 30, 20, 32, sink=True, bias=True, ahead=7),
    "a key with 99.9%, two blocks of heads": Entry(3, 1, 66, 32, 30, 20, 16, ahead=7),
    "a key with 99.9%, scales of blocks": Entry(3, 1, 4, 160, 12, 7, 128, scales="blocks", ahead=7),
    "values with much in common": Entry(6, 1, 8, 80, 40, 30, 64, common=10),
}
"""Where a gradient of a score is a small difference of large numbers."""

FEW = (
    "values in both parts",
    "a sink and a bias",
    "rows in several parts",
    "scales of blocks that parts cut",
    "a key with nearly all, values in both parts",
    "more heads than one tile",
    "whole tiles of heads and slots",
)
"""An entry for each path."""


def inputs(entry: Entry, seed: int = 0, device: str = "cpu") -> dict[str, Any]:
    """Return the arguments of `attend`, and gradients of both results: some slots hold nothing, and the first query chose nothing."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        wide = torch.randn((*shape[:-1], 2 * shape[-1] if entry.strided else shape[-1]), generator=generator)
        return wide.to(entry.dtype).to(device)[..., :: 2 if entry.strided else 1]

    candidates = max(entry.keys, entry.slots) + 3
    rows = [torch.randperm(candidates, generator=generator)[: entry.slots] for _ in range(entry.batch * entry.queries)]
    indices = torch.stack(rows).view(entry.batch, entry.queries, entry.slots)
    indices[:, 0] = -1
    key = normal(entry.keys, entry.batch, 1, entry.dim)
    if entry.common:
        key[..., : entry.value] += entry.common * normal(1, 1, 1, entry.value)
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
    if entry.sharpness != 1:
        made["query"] = made["query"] * entry.sharpness
    if entry.ahead:
        _bring_a_slot_ahead(made, entry.ahead)
    if entry in PEAKED.values() and not entry.sink:
        above_lse.zero_()  # it would be most of the gradient of a heavy slot
    return {"given": made, "above": above, "above_lse": above_lse}


def _bring_a_slot_ahead(made: dict[str, Any], ahead: float) -> None:
    """Add to each query as much of the key of a slot as brings its score so far over the log-sum-exp of the others."""
    query, key, indices = made["query"], made["key"], made["indices"]
    key = key.opened(torch.float64) if isinstance(key, QuantizedKeys) else key.double()
    heavy = torch.where((indices >= 0) & (indices < key.size(0)), indices, -1).amax(dim=2)  # one of those that are keys
    others = indices.masked_fill(indices == heavy[..., None], -1)
    _, lse = reference.attend(query.double(), key, others, made["scale"], made["value_channels"], bias=made["bias"])
    towards = key[heavy.clamp(min=0).T.long(), torch.arange(key.size(1), device=key.device), 0][:, :, None]
    score = (query.double() * towards).sum(dim=3) * made["scale"]
    if made["bias"] is not None:
        place = (indices == heavy[..., None]).to(torch.uint8).argmax(dim=2, keepdim=True)
        score = score + made["bias"].double().gather(2, place)[..., 0].T[:, :, None]
    missing = (ahead + lse - score) / (towards.square().sum(dim=3) * made["scale"])
    missing = missing.masked_fill(~torch.isfinite(lse), 0.0)
    made["query"] = (query.double() + missing[..., None] * towards).to(query.dtype)


class _GradientInDtype(torch.autograd.Function):  # type: ignore[misc] # torch is not seen by the type checker
    """Round a gradient to a dtype on its way."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = dtype
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.dtype).to(gradient.dtype), None


def in_dtype(
    query: torch.Tensor,
    key: torch.Tensor | QuantizedKeys,
    indices: torch.Tensor,
    scale: float,
    value_channels: int,
    sink: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results and gradients of PyTorch with scores and softmax in float32 and each factor of a product in the dtype of the
    query. No kernel of that dtype can do with less rounding."""
    dtype = query.dtype
    if isinstance(key, QuantizedKeys):
        key = key.opened(dtype)
    chosen = (indices >= 0) & (indices < key.size(0))
    rows = torch.where(chosen, indices, 0).long()
    keys = key[:, :, 0].transpose(0, 1)[torch.arange(key.size(1), device=key.device)[:, None, None], rows]
    keys = keys.masked_fill(~chosen[..., None], 0.0).float()
    scores = _GradientInDtype.apply(torch.einsum("sbhd,bstd->bsht", query.float(), keys) * scale, dtype)
    if bias is not None:
        scores = scores + bias[:, :, None]
    scores = scores.masked_fill(~chosen[:, :, None], float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.float().expand(*scores.shape[:2], -1)[..., None]], dim=-1)
    nothing = torch.isneginf(scores).all(dim=-1, keepdim=True)
    shares = torch.softmax(scores.masked_fill(nothing, 0.0), dim=-1).masked_fill(nothing, 0.0)[..., : indices.size(2)]
    output = torch.einsum("bsht,bstd->sbhd", shares.to(dtype).float(), keys[..., :value_channels]).to(dtype)
    return output, torch.logsumexp(scores, dim=-1).transpose(0, 1)


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


def kept(device: str) -> None:
    """Print how many numbers of a third result the forward pass has, and how many outputs."""
    given = inputs(GRID["values in both parts"], device=device)["given"]
    module = function.implementation(
        given["query"].dtype, given["key"].dtype, given["query"].size(3), given["key"].device
    )
    names = ("query", "key", "indices", "scale", "value_channels", "sink", "bias")
    found = {learns: module.forward(*(given[name] for name in names), learns=learns) for learns in (False, True)}
    numbers = {
        "outputs": found[True][0].numel(),
        "kept": found[True][2].numel(),
        "kept in vain": found[False][2].numel(),
    }
    print(json.dumps({"a third result": numbers}), flush=True)  # noqa: T201 - read by the tests


def main(device: str, sizes: str = "all") -> None:
    """Print a line for each entry: its name, the module that computed, errors, and whether a rerun gave the same bits."""
    kept(device)
    asked = FEW if sizes == "few" else (*PEAKED, *GRID)
    for name, entry in PEAKED.items():
        if name not in asked:
            continue
        made = inputs(entry, device=device)
        true = results(reference.attend, made, torch.float64)
        away = {
            name: errors(results(way, made, None), true)
            for name, way in (("kernels", function.attend), ("PyTorch", in_dtype))
        }
        print(json.dumps({name: away}), flush=True)  # noqa: T201 - read by the tests
    for name, entry in GRID.items():
        if name not in asked:
            continue
        made = inputs(entry, device=device)
        module = function.implementation(entry.dtype, entry.dtype, entry.dim, made["above"].device)
        if entry.parts:
            tiles._LEAST_SLOT_BYTES = tiles._MOST_SLOT_BYTES = 3000
            module._KEPT_BYTES, slot_order._KEYS_OF_16_BITS = 20000, 0
        opened = results(function.attend, made, None) if entry.scales else {}
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
    main(*sys.argv[1:])
