"""Attention over chosen keys as two custom operators, so that autograd, CUDA graphs and torch.compile treat each as one step.

Dtypes, channels and device select the implementation, once for each combination: tensor cores for bfloat16 and
float16 on NVIDIA's Hopper, plain PyTorch in blocks for everything else. Memory in addition to inputs and results has a bound
that does not grow with queries times keys. On tensor cores the output before rounding is kept for the backward pass: its
rounding error, 16 bits of each number, is a third result of the forward operator, empty where no gradient is wanted.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import torch

from megacpp_overlays.kernels.sparse_attention import in_torch
from megacpp_overlays.kernels.sparse_attention.quantized_keys import QuantizedKeys
from megacpp_overlays.variables import SPARSE_ATTENTION_CHOICES, chosen


def attend(
    query: torch.Tensor,
    key: torch.Tensor | QuantizedKeys,
    indices: torch.Tensor,
    scale: float,
    value_channels: int,
    sink: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted mean of the values that each query chose, and the log-sum-exp of its scores.

    Differentiable once in query, key and sink, through both results. A key that is chosen twice counts twice. FP8 numbers
    have no gradient: that of `QuantizedKeys` goes to the tensor that they name, in its dtype, or is not kept.

    Args:
        query: (queries, batch, heads, dim), floating, any strides.
        key: (keys, batch, 1, dim), floating; the heads share it, and its first `value_channels` are the value. Or
            `QuantizedKeys` of these sizes, whose bytes are read where keys are, and scaled in float32 on the way.
        indices: (batch, queries, slots), int32 or int64: a key of the same batch element, or no choice where it is below 0
            or no key. With packed sequences they count from the beginning of the row, as everywhere in Megatron.
        scale: factor of the products of query and key before the softmax.
        value_channels: from 1 to dim.
        sink: (heads,), a score of each head that takes part in the softmax and has no value.
        bias: (batch, queries, slots), added to the scaled products of a slot; has no gradient.

    Returns:
        (queries, batch, heads, value_channels) in the dtype of query, 0 where nothing was chosen and there is no sink, and
        (queries, batch, heads), float32, -inf there; both contiguous.

    Raises:
        TypeError: the dtype of a part of `QuantizedKeys` is none that is read.
        ValueError: shapes, dtypes or devices do not belong together, or MEGACPP_SPARSE_ATTENTION_CHOICES asks for a check and
            a choice does not stand it, see `check_choices`.
    """
    scales = learner = None
    if isinstance(key, QuantizedKeys):
        key.check(query.dtype)
        # As bits: code that looks at an operator's inputs, such as a compiler, need not know FP8.
        key, scales, learner = key.data.detach().view(torch.uint8), key.scales().detach(), key.gradient_for
    _check(query, key, indices, value_channels, {"sink": sink, "bias": bias, "scale": scales, "gradient_for": learner})
    if chosen(SPARSE_ATTENTION_CHOICES) == "check":
        check_choices(indices, key.size(0))
    learns = torch.is_grad_enabled() and any(
        each is not None and each.requires_grad for each in (query, key, sink, learner)
    )
    output, lse, _ = _attend(query, key, indices, scale, value_channels, sink, bias, scales, learner, learns)
    return output, lse


def check_choices(indices: torch.Tensor, keys: int) -> None:
    """Raise unless each index is -1 or a key, and no query chose a key twice; waits for the device, so it is for debugging.

    Raises:
        ValueError: it names the first batch element and query where it is not so, and the index.
    """
    outside = (indices < -1) | (indices >= keys)
    ordered = indices.sort(dim=-1).values
    twice = torch.zeros_like(outside)
    twice[..., 1:] = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    for found, values, what in (
        (outside, indices, f"is neither -1 nor one of {keys} keys"),
        (twice, ordered, "is chosen twice"),
    ):
        if found.any():
            element, query, slot = found.nonzero()[0].tolist()
            raise ValueError(
                f"batch element {element}, query {query}: index {int(values[element, query, slot])} {what}"
            )


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    indices: torch.Tensor,
    value_channels: int,
    others: dict[str, torch.Tensor | None],
) -> None:
    sink, bias = others["sink"], others["bias"]
    if (query.ndim, key.ndim) != (4, 4) or key.shape[1:] != (query.size(1), 1, query.size(3)):
        raise ValueError(
            "query and key must be (queries, batch, heads, dim) and (keys, batch, 1, dim), not "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )
    if key.size(0) == 0:
        raise ValueError("key must have at least one key; a query that chooses none has only indices of -1")
    if indices.ndim != 3 or indices.shape[:2] != (query.size(1), query.size(0)):
        raise ValueError(
            f"indices must be (batch, queries, slots) = {(query.size(1), query.size(0), '...')}, not {tuple(indices.shape)}"
        )
    if indices.dtype not in {torch.int32, torch.int64}:
        raise ValueError(f"indices must be int32 or int64, not {indices.dtype}")
    if not 1 <= value_channels <= query.size(3):
        raise ValueError(f"value_channels must be from 1 to dim = {query.size(3)}, not {value_channels}")
    if sink is not None and sink.shape != query.shape[2:3]:
        raise ValueError(f"sink must be (heads,) = {(query.size(2),)}, not {tuple(sink.shape)}")
    if bias is not None and bias.shape != indices.shape:
        raise ValueError(f"bias must be of the shape of indices, {tuple(indices.shape)}, not {tuple(bias.shape)}")
    tensors = [each for each in (query, key, indices, *others.values()) if each is not None]
    if len(devices := {str(each.device) for each in tensors}) > 1:
        raise ValueError(f"all tensors must be on one device, not on {' and '.join(sorted(devices))}")


@torch.library.custom_op("megacpp_overlays::sparse_attention", mutates_args=())  # type: ignore[untyped-decorator]
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    value_channels: int,
    sink: torch.Tensor | None,
    bias: torch.Tensor | None,
    key_scales: torch.Tensor | None = None,
    _learner: torch.Tensor | None = None,
    learns: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return output, log-sum-exp and the remainder of the output, which is empty unless a backward pass needs it."""
    output, lse, remainder = _way(query, key, key_scales).forward(
        query, key, indices, scale, value_channels, sink, bias, key_scales, learns
    )
    return output, lse, remainder


def _way(query: torch.Tensor, key: torch.Tensor, key_scales: torch.Tensor | None) -> ModuleType:
    return implementation(query.dtype, _read_as(query, key, key_scales), query.size(3), query.device)


def _read_as(query: torch.Tensor, key: torch.Tensor, key_scales: torch.Tensor | None) -> torch.dtype:
    """Return the dtype in which keys take part: quantized ones, which are bits and scales, in that of the query."""
    return key.dtype if key_scales is None else query.dtype


@torch.library.custom_op("megacpp_overlays::sparse_attention_gradients", mutates_args=())  # type: ignore[untyped-decorator]
def _gradients(
    grad: torch.Tensor,
    of_lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    remainder: torch.Tensor,
    lse: torch.Tensor,
    key_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    of_query, of_key, mean = _way(query, key, key_scales).backward(
        grad, of_lse, query, key, indices, scale, sink, bias, output, remainder, lse, key_scales
    )
    return of_query, of_key, mean


@_attend.register_fake  # type: ignore[untyped-decorator]
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    _indices: torch.Tensor,
    _scale: float,
    value_channels: int,
    _sink: torch.Tensor | None,
    _bias: torch.Tensor | None,
    key_scales: torch.Tensor | None = None,
    _learner: torch.Tensor | None = None,
    learns: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    output = query.new_empty((*query.shape[:3], value_channels))
    has_remainder = learns and _way(query, key, key_scales) is not in_torch
    remainder = query.new_empty(output.shape if has_remainder else (0,), dtype=torch.int16)
    return output, query.new_empty(query.shape[:3], dtype=torch.float32), remainder


@_gradients.register_fake  # type: ignore[untyped-decorator]
def _(
    _grad: torch.Tensor,
    _of_lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    _indices: torch.Tensor,
    _scale: float,
    _sink: torch.Tensor | None,
    _bias: torch.Tensor | None,
    _output: torch.Tensor,
    _remainder: torch.Tensor,
    lse: torch.Tensor,
    key_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    of_key = key.new_empty(key.shape, dtype=_read_as(query, key, key_scales))
    return query.new_empty(query.shape), of_key, lse.new_empty(lse.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    query, key, indices, ctx.scale, _, sink, bias, key_scales, learner, _ = inputs
    ctx.learns = None if learner is None else learner.dtype
    ctx.save_for_backward(query, key, indices, sink, bias, key_scales, *output)


def _backward(
    ctx: Any, grad: torch.Tensor, of_lse: torch.Tensor, _of_remainder: None
) -> tuple[torch.Tensor | None, ...]:
    query, key, indices, sink, bias, key_scales, output, lse, remainder = ctx.saved_tensors
    of_query, of_key, mean = _gradients(
        grad, of_lse, query, key, indices, ctx.scale, sink, bias, output, remainder, lse, key_scales
    )
    of_sink = None if sink is None else (mean * torch.exp(sink.float() - lse)).sum(dim=(0, 1)).neg().to(sink.dtype)
    of_learner = None if ctx.learns is None else of_key.to(ctx.learns)
    return of_query, None if key_scales is not None else of_key, None, None, None, of_sink, None, None, of_learner, None


_attend.register_autograd(_backward, setup_context=_save)


@functools.cache
def implementation(query_dtype: torch.dtype, key_dtype: torch.dtype, dim: int, device: torch.device) -> ModuleType:
    """Return the module that computes: tensor cores where they take these inputs, else blocks in PyTorch."""
    if query_dtype == key_dtype and query_dtype in {torch.bfloat16, torch.float16}:
        # Asked for only here: the module needs a Triton that not every torch brings.
        try:
            tensor_cores = importlib.import_module("megacpp_overlays.kernels.sparse_attention.in_triton")
        except ImportError:
            return in_torch
        if tensor_cores.takes(query_dtype, dim, device):
            return tensor_cores
    return in_torch
