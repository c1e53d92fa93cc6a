"""The indexer over chosen keys on tensor cores: bfloat16 in, float32 sums; memory is bounded, without a matrix of all pairs.

The target: a program gathers the keys of a row by tiles of slots and writes one score for each slot and head, for some rows
at a time. Another program reads them twice, once for the softmax and once for the sum over heads. Rows are compared with the
target one by one, each read once. Gradients: a program gathers the keys of a row once, keeps the gradients of its query and
weights in registers, and writes for each slot its contribution to the gradient of its key. The contributions of the slots of a
key are added up in slot order, which a sort finds. No atomics, so a rerun gives the same bits.

Where they were measured (see `measured`), and for CPU tensors in the Triton interpreter.
"""

from __future__ import annotations

import torch
import triton
from packaging.version import Version

if Version(triton.__version__) < Version("3.6"):
    raise ImportError(f"triton {triton.__version__} is older than 3.6, the oldest that was tried")

from megacpp_overlays.kernels import measured
from megacpp_overlays.kernels.chosen_keys import device_code
from megacpp_overlays.kernels.devices import on_device_of
from megacpp_overlays.kernels.sparse_attention import device_code as attention_code
from megacpp_overlays.kernels.sparse_attention import in_triton as attention
from megacpp_overlays.kernels.sparse_attention import slot_order, tiles

_SCORE_BYTES = 1 << 28
"""Largest size of the scores of some rows' pairs."""
_LONGEST_ROW = 16384
"""Slots that a program compares, 32 a thread."""
_MOST_HEADS, _LARGEST_DIM = 64, 128
"""Of the indexer: a program holds all of a row."""
_SCORE_TILE = {"SLOTS": 32, "STAGES": 3, "num_warps": 1}
_SCORE_TILE_OF_MANY_HEADS = {"SLOTS": 32, "STAGES": 2, "num_warps": 4}
_GRADIENT_TILE = {"SLOTS": 64, "STAGES": 2, "num_warps": 4}
_SUMMED = 16384
"""Scores that a program of the second pass over the target holds at a time."""


def runs_on(device: torch.device) -> bool:
    """Return whether these kernels run on a device."""
    if device.type == "cpu":
        return bool(device_code.INTERPRETED)
    return not measured.declines(device, "the indexer over chosen keys", "plain PyTorch computes it in blocks")


def takes_target(query: torch.Tensor) -> bool:
    """Return whether the target of queries of attention, (queries, batch, heads, dim), is computed here."""
    is_half = query.dtype in {torch.bfloat16, torch.float16}
    return bool(is_half and tiles.SMALLEST_DIM <= query.size(3) <= tiles.LARGEST_DIM)


def takes_gradients(q: torch.Tensor) -> bool:
    """Return whether the gradients of queries of the indexer, (queries, batch, heads, dim), are computed here."""
    return bool(q.dtype == torch.bfloat16 and 0 < q.size(2) <= _MOST_HEADS and 0 < q.size(3) <= _LARGEST_DIM)


def takes_rows(slots: int) -> bool:
    """Return whether rows of so many slots are compared here."""
    return slots <= _LONGEST_ROW


def target(query: torch.Tensor, key: torch.Tensor, indices: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the softmax over the chosen keys, summed over heads: see `function.target`."""
    query, key, indices = _rows(query), _rows(key), indices.contiguous()
    queries, batch, heads, dim = query.shape
    slots, rows = indices.size(2), queries * batch
    result = torch.empty(indices.shape, dtype=torch.float32, device=query.device)
    if 0 in {result.numel(), heads}:
        return result.zero_()
    parts = tiles.parts_of(dim, dim)
    block = max(16, min(64, int(triton.next_power_of_2(heads))))
    some = max(1, min(rows, _SCORE_BYTES // (4 * slots * heads)))
    scores = torch.empty((some, slots, heads), dtype=torch.float32, device=query.device)
    with on_device_of(query):
        counts = _counts(indices, key.size(0))
        wide = max(1, int(triton.next_power_of_2(heads)))
        for start in range(0, rows, some):
            fewer = min(some, rows - start)
            device_code.score_pairs[(fewer * triton.cdiv(heads, block),)](
                *(query, key, indices, counts, scores, start, batch, heads, slots, dim, scale * device_code.LOG2_E),
                *(*query.stride()[:3], *key.stride()[:2], *indices.stride()[:2]),
                FIRST=parts.first,
                REST=parts.rest,
                HEADS=block,
                **(_SCORE_TILE if block == 16 else _SCORE_TILE_OF_MANY_HEADS),
            )
            device_code.sum_heads[(fewer,)](
                *(scores, counts, result, start, batch, queries, heads, slots),
                HEADS=wide,
                SLOTS=max(1, _SUMMED // wide),
                num_warps=4,
            )
    return result


def compare(scores: torch.Tensor, sums: torch.Tensor, indices: torch.Tensor, smallest: float) -> torch.Tensor:
    """Return the divergence of each row, and write differences over the scores: see `function.compare`."""
    batch, queries, slots = indices.shape
    divergences = torch.zeros((batch, queries), dtype=torch.float32, device=scores.device)
    if scores.numel() > 0:
        wide = int(triton.next_power_of_2(slots))
        with on_device_of(scores):
            device_code.compare_rows[(batch * queries,)](
                *(scores, sums.contiguous(), indices.contiguous(), divergences, slots, smallest),
                SLOTS=wide,
                num_warps=max(1, min(16, wide // 512)),
            )
    return divergences


def gradients(
    grad: torch.Tensor,
    indices: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    use_relu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, weights and k: see `function.gradients`."""
    grad, indices, q, k = grad.float().contiguous(), indices.contiguous(), _rows(q), _rows(k)
    queries, batch, heads, dim = q.shape
    keys, slots, rows = k.size(0), indices.size(2), queries * batch
    of_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    of_weights = torch.empty(weights.shape, dtype=weights.dtype, device=q.device)
    of_k = torch.zeros((keys * batch, dim), dtype=torch.float32, device=q.device)
    if grad.numel() == 0:
        return of_q.zero_(), of_weights.zero_(), of_k.view(k.shape).to(k.dtype)
    some = max(1, min(rows, tiles.slot_bytes(keys * batch, dim) // (2 * slots * dim)))
    of_slots = torch.empty((some, slots, dim), dtype=torch.float16, device=q.device)
    units = torch.empty((some, slots, 1), dtype=torch.float32, device=q.device)
    padded = max(16, int(triton.next_power_of_2(dim)))
    with on_device_of(q):
        counts = _counts(indices, keys)
        for start in range(0, rows, some):
            fewer = min(some, rows - start)
            device_code.pair_gradients[(fewer,)](
                *(grad, indices, counts, q, weights, k, of_q, of_weights, of_slots, units),
                *(start, batch, heads, slots, dim, *q.stride()[:3], *weights.stride(), *k.stride()[:2]),
                *indices.stride()[:2],
                RELU=use_relu,
                ROUNDED=weights.dtype == torch.bfloat16,
                DIM=padded,
                HEADS=max(16, int(triton.next_power_of_2(heads))),
                **_GRADIENT_TILE,
            )
            order, ends = slot_order.sorted_slots(indices, keys, start, fewer)
            attention.sum_slots(of_slots, units, order, ends, of_k, [tiles.SumTiles(0, 1, padded, 0, 0)], start == 0)
    return of_q, of_weights, of_k.view(k.shape).to(k.dtype)


def _counts(indices: torch.Tensor, keys: int) -> torch.Tensor:
    """Return for each row how many of its slots there are up to its last key."""
    batch, queries, slots = indices.shape
    counts = torch.empty((queries * batch,), dtype=torch.int32, device=indices.device)
    attention_code.count_slots[(queries * batch,)](
        *(indices, counts, batch, keys, slots, *indices.stride()[:2]), SLOTS=1024
    )
    return counts


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose last axis has unit stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
