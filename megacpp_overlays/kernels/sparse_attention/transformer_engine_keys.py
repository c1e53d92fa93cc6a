"""Keys that Transformer Engine quantized, read as FP8 numbers and scales.

Transformer Engine is not imported: a key brings its class along.
"""

from __future__ import annotations

from typing import Any

import torch

from megacpp_overlays.kernels.sparse_attention import function
from megacpp_overlays.kernels.sparse_attention.quantized_keys import QuantizedKeys
from megacpp_overlays.runtime import float8_payload, multi_query, quantized


def read(key: Any) -> QuantizedKeys | None:
    """Return a key as it is stored, its gradient still its own; None if it has to be dequantized.

    Nothing is copied: the kernel reads the bytes in its backward pass again, so they must not be written to until then.

    Args:
        key: (keys, batch, 1, dim), of any class. Float8Tensor and Float8BlockwiseQTensor of E4M3 numbers are read, see
            `float8_payload`.
    """
    payload = float8_payload.held_by(key)
    if payload is None or payload.data.ndim != 4 or payload.data.size(2) != 1:
        return None
    scale = payload.scale if payload.scale.ndim == 0 else payload.scale.squeeze(2)
    return QuantizedKeys(payload.data, scale, learner(key))


def learner(tensor: Any) -> torch.Tensor | None:
    """Return a tensor whose gradient goes straight to a quantized one, as that of the dequantized tensor would.

    Returns:
        A tensor of the same shape, dtype and device, whose numbers mean nothing and take the storage of one; None where a
        dequantized tensor would have no gradient.
    """
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return None
    found: torch.Tensor = _StandIn.apply(tensor)
    return found


class _StandIn(torch.autograd.Function):  # type: ignore[misc] # torch is not seen by the type checker
    """Give a tensor without numbers the history of a quantized one."""

    @staticmethod
    def forward(_ctx: Any, tensor: Any) -> torch.Tensor:
        return torch.empty(1, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def attend(query: Any, key: Any, topk_indices: Any, softmax_scale: Any, v_channels: Any) -> Any:
    """Return the output of absorbed attention over a quantized key, None for a key that `read` does not take.

    It can be registered with `fp8_sparse_mla.register`.

    Args:
        query: (queries, batch, heads, dim), bfloat16 or float16; dequantized if it is quantized.
        key: (keys, batch, 1, dim), quantized, and of the same dtype to those who ask.
        topk_indices: (batch, queries, slots), any integers; no choice where below 0.
        softmax_scale: a number.
        v_channels: from 1 to dim.

    Returns:
        (queries, batch, heads, v_channels), differentiable in query and key; or None.
    """
    keys = read(key)
    if keys is None or not multi_query.matches(query, key, topk_indices, softmax_scale, v_channels):
        return None
    if query.dtype not in {torch.bfloat16, torch.float16}:
        return None
    if type(query) not in {torch.Tensor, torch.nn.Parameter} and quantized.is_quantized(query):
        query = quantized.dequantized(query)
    indices = multi_query.to_take(topk_indices, query.device)
    return function.attend(query, keys, indices, softmax_scale, v_channels)[0]
