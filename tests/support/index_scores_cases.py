"""Inputs of the index scores, their layouts in memory, and how far rounding may take the results from float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

DEVICES = {
    name: SimpleNamespace(
        major=major, minor=minor, shared_memory_per_block_optin=shared, multi_processor_count=processors
    )
    for name, major, minor, shared, processors in (
        ("T4", 7, 5, 65536, 40),
        ("A100", 8, 0, 166912, 108),
        ("RTX 4090", 8, 9, 101376, 128),
        ("H200", 9, 0, 232448, 132),
        ("B200", 10, 0, 232448, 148),
        ("RTX 5090", 12, 0, 101376, 170),
    )
}
"""The properties that torch reports of some devices; shared memory in bytes."""

LAYOUTS = [
    "contiguous",
    "batch first",
    "slices of queries",
    "every other of dim",
    "dim outermost",
    "one batch expanded",
]
LAYOUTS_OF_GRADIENT = ["contiguous", "queries first", "every other key", "one number"]

SPOILS = {
    f"{number} {where}, {gates}, relu {use_relu}": (number, where == "alone", gates == "open", use_relu)
    for number in (float("nan"), float("inf"))
    for where in ("alone", "among others")
    for gates in ("open", "closed")
    for use_relu in (True, False)
}
"""A number from above in one place, whether all else is 0, whether all gates are open there, and if there are gates."""

UNIT = 2.0**-24
"""Largest relative error of one float32 operation."""
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: UNIT, torch.float64: 0.0}
"""Largest relative error of one rounding to a dtype; a cut, as in Triton's interpreter, doubles it."""


def whole(
    seed: int, queries: int, keys: int, batch: int, heads: int, dim: int, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """Return q, weights, k and a gradient of small whole numbers: many products are zero, and every sum is exact."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int, largest: int = 2) -> torch.Tensor:
        return torch.randint(-largest, largest + 1, shape, generator=generator)

    q, weights, k = values(queries, batch, heads, dim), values(queries, batch, heads), values(keys, batch, dim)
    return q.to(dtype), weights.to(dtype), k.to(dtype), values(batch, queries, keys, largest=1000).float()


def random(
    seed: int, queries: int, keys: int, batch: int, heads: int, dim: int, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """Return q, weights, k and a gradient, each normally distributed."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, weights, k = values(queries, batch, heads, dim), values(queries, batch, heads), values(keys, batch, dim)
    return q, weights, k, torch.randn(batch, queries, keys, generator=generator)


def spoil(number: float, alone: bool, is_open: bool) -> Any:
    """Return q, weights, k and a gradient of whole numbers with one number put into the gradient, and its place."""
    queries, batch, keys = place = (66, 1, 130)
    q, weights, k, grad = whole(11, queries + 4, keys + 9, batch + 1, 2, 16)
    q = q.abs() + 1
    k[keys, batch] = k[keys, batch].abs() + 1 if is_open else -k[keys, batch].abs() - 1
    if alone:
        grad.zero_()
    grad[batch, queries, keys] = number
    return (q, weights, k, grad), place


def by_hand(grad: torch.Tensor, q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, use_relu: bool) -> Any:
    """Return the gradients of q, weights and k as upstream's manual backward defines them: gates multiply."""
    products = torch.einsum("sbhd,tbd->sbht", q, k)
    above = grad.transpose(0, 1)[:, :, None]
    of_products = above * weights[..., None]
    if use_relu:
        of_products = of_products * (products > 0).to(products.dtype)
        products = products.relu()
    return (
        torch.einsum("sbht,tbd->sbhd", of_products, k),
        (above * products).sum(dim=-1),
        torch.einsum("sbht,sbhd->tbd", of_products, q),
    )


def misplaced(found: Any, number: float, alone: bool, is_open: bool, use_relu: bool) -> dict[str, list[list[int]]]:
    """Return where gradients for `spoil` are finite and upstream's are not, or the reverse, or where others differ.

    In upstream's code the number spoils all that it reaches: every dim and head of its query, and every dim of its key.
    """
    (q, weights, k, grad), (query, batch, key) = spoil(number, alone, is_open)
    truths = by_hand(*[each.double() for each in (grad, q, weights, k)], use_relu=use_relu)
    bad = {}
    for name, place, seen, true in zip(("q", "weights", "k"), (query, query, key), found, truths, strict=True):
        reached = torch.zeros(true.shape, dtype=torch.bool)
        reached[place, batch] = True
        assert torch.equal(~true.isfinite(), reached)
        margin = 2 * ROUNDING[seen.dtype] * true.abs()
        right = torch.where(reached, ~seen.isfinite(), (seen.double() - true).abs() <= margin)
        bad[name] = (~right).nonzero().tolist()
    return {name: places for name, places in bad.items() if places}


def lay_out(layout: str, q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
    """Return the same numbers with other strides. An expanded batch repeats the numbers of the first one."""
    return [_lay_out(layout, each) for each in (q, weights, k)]


def _lay_out(layout: str, tensor: torch.Tensor) -> torch.Tensor:
    if layout == "batch first":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "slices of queries":  # as a context-parallel rank may see them
        return torch.stack([tensor, tensor.new_full(tensor.shape, 99)], dim=1).flatten(0, 1)[::2]
    if layout == "every other of dim":
        return torch.stack([tensor, tensor.new_full(tensor.shape, 99)], dim=-1).flatten(-2)[..., ::2]
    if layout == "dim outermost":
        return tensor.movedim(-1, 0).contiguous().movedim(0, -1)
    if layout == "one batch expanded" and tensor.size(1):
        return tensor[:, :1].expand(tensor.shape)
    return tensor


def lay_out_gradient(layout: str, grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient of the same numbers with other strides; one number is a number of its own."""
    if layout == "queries first":
        return grad.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "every other key":
        return _lay_out("every other of dim", grad)
    if layout == "one number":
        return grad.new_tensor(3.0).expand(grad.shape)
    return grad


def roundings(
    found: tuple[torch.Tensor, ...],
    grad: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    use_relu: bool,
    of_above: float = UNIT,
    cut: bool = False,
) -> dict[str, tuple[float, float]]:
    """Return for the scores and each gradient the largest share of its allowed error, and its error in the norm.

    The allowed error is the loss of float32 sums of that many terms, in any order, and one rounding to the dtype of the
    gradient. Where rounding may turn the sign of a product, its gate may be open or closed.

    Args:
        found: scores, gradients of q, weights and k.
        grad: the gradient of the scores, float32; then the inputs.
        of_above: the largest relative error of the numbers that are multiplied with keys and queries.
        cut: whether a dtype cuts instead of rounding.
    """
    above, q64, w64, k64 = (each.double() for each in (grad, q, weights, k))
    queries, _, heads, dim = q.shape
    keys = k.size(0)
    product = torch.einsum("sbhd,tbd->bhst", q64, k64)
    size = torch.einsum("sbhd,tbd->bhst", q64.abs(), k64.abs())
    unclear = (product.abs() <= (dim + 4) * UNIT * size) & (size > 0) if use_relu else torch.zeros_like(size).bool()
    gate = (product > 0).double() if use_relu else torch.ones_like(product)
    each = torch.einsum("bst,sbh->bhst", above, w64)

    def spread(sign: Any, factor: float, live: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the three gradients for gates between 0 and 1, or sums of their absolute terms."""
        return {
            "q": factor * torch.einsum("bhst,bhst,tbd->sbhd", sign(each), live, sign(k64)),
            "k": factor * torch.einsum("bhst,bhst,sbhd->tbd", sign(each), live, sign(q64)),
        }

    true = {
        "scores": torch.einsum("bhst,bhst,sbh->bst", product, gate, w64),
        "weights": torch.einsum("bst,bhst,bhst->sbh", above, product, gate),
        **spread(lambda x: x, 1.0, gate),
    }
    everything = torch.ones_like(gate)
    in_q = spread(torch.abs, UNIT * (keys + 6) + of_above, everything)
    in_k = spread(torch.abs, UNIT * (queries * heads + 6) + of_above, everything)
    flipped = spread(torch.abs, 1.0, unclear.double())
    allowed = {
        "scores": UNIT * (dim + heads + 6) * torch.einsum("bhst,sbh->bst", size, w64.abs()),
        "weights": UNIT * (dim + keys + 6) * torch.einsum("bst,bhst->sbh", above.abs(), size),
        "q": in_q["q"] + flipped["q"],
        "k": in_k["k"] + flipped["k"],
    }
    shares = {}
    for what, seen in zip(("scores", "q", "weights", "k"), found, strict=True):
        truth, margin = true[what], 1.01 * allowed[what]
        margin = (
            margin + (1 + cut) * ROUNDING[seen.dtype] * (truth.abs() + margin) + 1e-7 * (seen.dtype == torch.float16)
        )
        error = (seen.double() - truth).abs()
        share = torch.where(error > 0, error / margin, 0.0)
        norm = float(truth.norm())
        shares[what] = (float(share.max()) if share.numel() else 0.0, float(error.norm()) / norm if norm else 0.0)
    return shares
