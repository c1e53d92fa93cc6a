"""Inputs of the attention target, the kinds of valid keys, and how far rounding may take the results from float64."""

from __future__ import annotations

import torch

from megacpp_overlays.kernels.attention_target import reference

UNIT = 2.0**-24
"""Largest relative error of one float32 operation."""

SIZES = {
    "odd": (65, 130, 2, 3, 80),
    "one of each": (1, 1, 1, 1, 16),
    "dim 5": (7, 20, 2, 2, 5),
    "few keys": (130, 3, 2, 2, 64),
    "few queries": (3, 140, 1, 2, 96),
    "dim 128": (70, 66, 1, 2, 128),
    "dim 192": (40, 70, 1, 2, 192),
    "dim 256": (20, 70, 1, 2, 256),
    "dim 320": (20, 70, 1, 2, 320),
    "dim 576": (66, 66, 1, 2, 576),
    "dim 600": (20, 20, 1, 2, 600),
    "dim 640": (20, 20, 1, 1, 640),
}
"""Queries, keys, batch, heads and dim."""
VALID = (
    *("causal", "packed", "key positions", "mask", "mask of each batch", "support", "support and mask"),
    "support and key positions",
)
"""Kinds of valid keys; each but the first has rows that see nothing where there are enough of them."""


def inputs(
    seed: int, queries: int, keys: int, batch: int, heads: int, dim: int, dtype: torch.dtype = torch.bfloat16,
    key_heads: int | None = None, device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return query and key of normal numbers, made on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(queries, batch, heads, dim, generator=generator)
    key = torch.randn(keys, batch, heads if key_heads is None else key_heads, dim, generator=generator)
    return query.to(dtype).to(device), key.to(dtype).to(device)


def valid_of(kind: str, queries: int, keys: int, batch: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return the arguments that define the valid keys."""
    generator = torch.Generator().manual_seed(queries + keys)
    places = torch.arange(queries)
    if "mask" in kind:
        mask = torch.randn((batch, queries, keys) if "batch" in kind else (queries, keys), generator=generator)
        mask = mask.masked_fill(torch.arange(keys) > places[:, None], -torch.inf)
        mask = mask.masked_fill(torch.rand(mask.shape, generator=generator) > 0.8, -torch.inf)
        if queries > 2:
            mask[..., 2, :] = -torch.inf
            mask[..., 1, 0] = torch.inf  # not finite is not valid, whatever its sign
        found = {"mask": mask}
    else:
        starts, ends = torch.zeros_like(places), places + 1
        if kind != "causal":
            starts[queries // 2 :] = queries // 3
            ends[2:3] = 0
        found = {"starts": starts, "ends": ends}
        if "positions" in kind:
            found["key_positions"] = torch.randperm(keys, generator=generator)
    if "support" in kind:
        found["topk_indices"] = torch.randint(-1, keys, (batch, queries, 5), generator=generator)
    return {name: each.to(device) for name, each in found.items()}


def seen(valid: dict[str, torch.Tensor], queries: int, keys: int, batch: int) -> torch.Tensor:
    """Return the valid keys of each query, by definition: (batch, queries, keys), bool."""
    if "mask" in valid:
        found = valid["mask"].isfinite().expand(batch, queries, keys)
    else:
        places = valid.get("key_positions", torch.arange(keys, device=valid["starts"].device))
        found = (places >= valid["starts"][:, None]) & (places < valid["ends"][:, None])
        found = found.expand(batch, queries, keys)
    if "topk_indices" in valid:
        chosen = (valid["topk_indices"][..., None] == torch.arange(keys, device=found.device)).any(dim=2)
        found = found & chosen
    return found


def truth(query: torch.Tensor, key: torch.Tensor, scale: float, valid: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the target in float64."""
    mask = valid.get("mask")
    visible = seen(valid, query.size(0), key.size(0), query.size(1))
    return reference.target(query.double(), key.double(), scale, visible, None if mask is None else mask.double())


def share(
    found: torch.Tensor, query: torch.Tensor, key: torch.Tensor, scale: float, valid: dict[str, torch.Tensor]
) -> float:
    """Return the largest share of the error that float32 sums of that many terms may have, in any order.

    A score may be off by `dim` roundings of the magnitudes of its terms, in either of two computations of it; a sum of
    exponentials by one rounding for each key; the sum over heads by one for each.
    """
    if not found.numel():
        return 0.0
    true = truth(query, key, scale, valid)
    size = torch.einsum("sbhd,tbhd->bhst", query.double().abs(), key.double().abs().expand(-1, -1, query.size(2), -1))
    of_scores = scale * float(size.max()) if size.numel() else 0.0
    if "mask" in valid:
        finite = valid["mask"].double().masked_fill(~valid["mask"].isfinite(), 0.0)
        of_scores += float(finite.abs().max())
    relative = UNIT * (2 * (query.size(3) + 8) * of_scores + key.size(0) + query.size(2) + 16)
    error = (found.double() - true).abs()
    return float(torch.where(error > 0, error / (relative * true), 0.0).max())
