"""Attention over chosen keys in plain PyTorch, some rows at a time: for the CPU, float32 and odd dtypes.

Float32 arithmetic, float64 for float64 inputs. In addition to the results it holds the gradient of the keys and a few blocks of
at most 4 Mi elements, 32 Mi on a GPU: the chosen keys of some rows, (rows, slots, dim), or those of one row if that is more.
Blocks are added in one order, so a rerun gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megacpp_overlays.kernels.sparse_attention import quantized_keys

_BLOCK_ELEMENTS, _BLOCK_ELEMENTS_ON_A_GPU = 1 << 22, 1 << 25


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    value: int,
    sink: torch.Tensor | None,
    bias: torch.Tensor | None,
    key_scales: torch.Tensor | None = None,
    learns: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, (queries, batch, heads, value), and the log-sum-exp, (queries, batch, heads): see `function.attend`.

    With `key_scales`, (keys, batch, blocks), key holds the bits of FP8 numbers. The third result is empty: the backward pass
    needs no more of the output.
    """
    queries, batch, heads, _ = query.shape
    out = query.new_empty((queries, batch, heads, value))
    lse = torch.empty((queries, batch, heads), dtype=torch.float32, device=query.device)
    with _no_autocast(query):
        for element, rows in _blocks(query, indices):
            keys, scores = _scores(query, key, indices, scale, bias, element, rows, key_scales)
            shares, _, total = _softmax(scores, sink)
            out[rows, element] = torch.bmm(shares, keys[..., :value]).to(out.dtype)
            lse[rows, element] = total.to(lse.dtype)
    return out, lse, out.new_empty((0,), dtype=torch.int16)


def backward(
    grad: torch.Tensor,
    of_lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
    bias: torch.Tensor | None,
    _out: torch.Tensor,
    _remainder: torch.Tensor,
    lse: torch.Tensor,
    key_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query and key, and (queries, batch, heads): output times gradient, less that of the lse.

    That of quantized keys is of the numbers that they stand for, in the dtype of query. Shares are taken from the scores, and
    output times gradient from shares and their gradients: of the log-sum-exp and of the output too many bits have been rounded
    away where a gradient of a score is a small difference of large numbers.
    """
    of_q = torch.empty_like(query, memory_format=torch.contiguous_format)
    learns = key.dtype if key_scales is None else query.dtype
    of_k = torch.zeros(key.shape, dtype=_wide(learns), device=key.device)
    with _no_autocast(query):
        mean = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
        for element, rows in _blocks(query, indices):
            keys, scores = _scores(query, key, indices, scale, bias, element, rows, key_scales)
            shares, of_sink, _ = _softmax(scores, sink)
            above = grad[rows, element].to(keys.dtype)
            of_shares = torch.bmm(above, keys[..., : grad.size(3)].mT)
            of_scores, middle = _through_softmax(of_shares, shares, of_sink, of_lse[rows, element])
            mean[rows, element] = middle.to(mean.dtype)
            of_scores = of_scores.mul_(scale)
            of_q[rows, element] = torch.bmm(of_scores, keys).to(of_q.dtype)
            of_slots = torch.bmm(of_scores.mT, query[rows, element].to(keys.dtype))
            of_slots[..., : grad.size(3)] += torch.bmm(shares.mT, above)
            chosen, places = _choices(key, indices, element, rows)
            _add_rows(of_k[:, element, 0], places, of_slots.masked_fill_(~chosen[..., None], 0.0))
    return of_q, of_k.to(learns), mean


def _add_rows(total: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
    """Add (..., n) rows to the rows of (m, n) at their (...) places, in an order that reruns have, too."""
    if total.device.type == "cpu":  # index_put_ of several threads has none there, and takes twice as long
        places = places.reshape(-1, 1).expand(-1, total.size(1))
        total.scatter_add_(0, places, rows.reshape(-1, total.size(1)))
    else:  # scatter_add_ and index_add_ have none on a GPU
        total.index_put_((places,), rows, accumulate=True)


def _choices(key: torch.Tensor, indices: torch.Tensor, element: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which slots of some rows hold a key, and which, 0 where none."""
    chosen = (indices[element, rows] >= 0) & (indices[element, rows] < key.size(0))
    return chosen, torch.where(chosen, indices[element, rows], 0).long()


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None,
    element: int,
    rows: slice,
    key_scales: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen keys, (rows, slots, dim), and their scores, (rows, heads, slots), -inf where nothing was chosen."""
    chosen, places = _choices(key, indices, element, rows)
    keys = key[:, element, 0][places]
    if key_scales is None:
        keys = keys.to(_wide(key.dtype))
    else:
        # Rounded as dequantized keys are, and as tensor cores take them.
        keys = quantized_keys.opened(keys, key_scales[:, element][places], query.dtype).to(_wide(query.dtype))
    keys = keys.masked_fill_(~chosen[..., None], 0.0)
    scores = torch.bmm(query[rows, element].to(keys.dtype), keys.mT).mul_(scale)
    if bias is not None:
        scores += bias[element, rows, None].to(scores.dtype)
    return keys, scores.masked_fill_(~chosen[:, None], float("-inf"))


def _softmax(scores: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return the softmax of scores, (rows, heads, slots), the share of the sink, and the log-sum-exp, (rows, heads).

    Divided by their sum, shares add up to 1 to rounding. The exponential of a score less the log-sum-exp is off by the rounding
    of that, which grows with the scores. Where there are no scores shares are 0 and the log-sum-exp is -inf.
    """
    slots = scores.size(-1)
    if sink is not None:
        scores = torch.cat([scores, sink.to(scores.dtype).expand(scores.size(0), -1)[..., None]], dim=-1)
    if scores.size(-1) == 0:
        return scores, None, scores.new_full(scores.shape[:2], float("-inf"))
    largest = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - largest.masked_fill(largest == float("-inf"), 0.0))
    total = weights.sum(dim=-1, keepdim=True)
    shares = weights.div_(total.masked_fill(total == 0, 1.0))
    return shares[..., :slots], None if sink is None else shares[..., slots], (largest + total.log()).squeeze(-1)


def _through_softmax(
    of_shares: torch.Tensor, shares: torch.Tensor, of_sink: torch.Tensor | None, of_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of the scores, and the mean of the gradients of shares less that of the log-sum-exp.

    Gradients of shares are taken relative to that of the largest share. The gradient of its score follows from the others. So
    no bits are lost where one share is nearly all, or where the gradients have a large common part.
    """
    if shares.size(-1) == 0:
        return of_shares, -of_lse
    base = of_shares.gather(-1, shares.argmax(dim=-1, keepdim=True))
    of_shares = of_shares.sub_(base)
    base = base.squeeze(-1)
    middle = (shares * of_shares).sum(dim=-1) - of_lse
    others = middle if of_sink is None else middle - base * of_sink
    return of_shares.sub_(others[..., None]).mul_(shares), others + base


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _no_autocast(query: torch.Tensor) -> torch.autocast:
    """Keep autocast, under which an operator may run, from turning the products into its own dtype."""
    return torch.autocast(query.device.type, enabled=False)


def _blocks(query: torch.Tensor, indices: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Yield batch elements and their queries in blocks."""
    queries, batch, heads, dim = query.shape
    elements = _BLOCK_ELEMENTS if query.device.type == "cpu" else _BLOCK_ELEMENTS_ON_A_GPU
    step = max(1, elements // max(1, indices.size(2) * max(dim, heads)))
    for element in range(batch):
        for first in range(0, queries, step):
            yield element, slice(first, min(first + step, queries))
