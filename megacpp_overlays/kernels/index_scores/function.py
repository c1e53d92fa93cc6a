"""Index scores of DeepSeek Sparse Attention and their gradients, without the (batch, queries, heads, keys) tensor.

Two custom operators, so that autograd, CUDA graphs and torch.compile treat each as one step. Dtypes, head dimension
and device select the implementation, once for each combination: tensor cores for bfloat16 queries and
keys on NVIDIA devices, plain PyTorch in blocks for everything else.

Source: section 2.1 of https://github.com/deepseek-ai/DeepSeek-V3.2-Exp/blob/main/DeepSeek_V3_2.pdf, and the upstream
threads NVIDIA/Megatron-LM 4039 and 5246.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import torch

from megacpp_overlays.kernels import measured
from megacpp_overlays.kernels.index_scores import streaming

_KERNEL_DTYPES = frozenset({torch.bfloat16})


def scores(q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, use_relu: bool = True) -> torch.Tensor:
    """Return the weighted sum over heads of the rectified products of queries and keys.

    Differentiable once in q, weights and k. The result is new and nothing keeps it, so callers may write into it.

    Args:
        q: (queries, batch, heads, dim), floating, any strides.
        weights: (queries, batch, heads), floating.
        k: (keys, batch, dim), floating; the heads share it.
        use_relu: False for models that weight the bare products, as GLM-5 does.

    Returns:
        (batch, queries, keys), float32, contiguous.

    Raises:
        ValueError: the shapes do not belong together, or the tensors are on several devices.
    """
    _check(q, weights, k)
    result: torch.Tensor = _scores(q, weights, k, use_relu)
    return result


def gradients(
    grad: torch.Tensor, q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, use_relu: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, weights and k, each in the dtype of its input, for a gradient of the scores.

    Args:
        grad: (batch, queries, keys), float32, any strides.
        q: see `scores`, as are the next three.

    Raises:
        ValueError: the shapes do not belong together, or the tensors are on several devices.
    """
    _check(q, weights, k)
    if grad.shape != (expected := (q.size(1), q.size(0), k.size(0))):
        raise ValueError(f"grad must be (batch, queries, keys) = {expected}, not {tuple(grad.shape)}")
    _check_devices(grad, q)
    of_q, of_weights, of_k = _gradients(grad, q, weights, k, use_relu)
    return of_q, of_weights, of_k


def serves(q: torch.Tensor, k: torch.Tensor, heads: int = 0) -> bool:
    """Return whether a call is served here and not by upstream's function, which builds (queries, batch, heads, keys).

    Args:
        q: (queries, batch, heads, dim).
        k: (keys, batch, dim).
        heads: of another such tensor that upstream builds meanwhile.
    """
    return measured.serves(q, _KERNEL_DTYPES, q.size(0) * q.size(1) * max(heads, q.size(2)) * k.size(0))


def _check(q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor) -> None:
    if (q.ndim, k.ndim) != (4, 3) or weights.shape != q.shape[:3] or k.shape[1:] != (q.size(1), q.size(3)):
        raise ValueError(
            "q, weights and k must be (queries, batch, heads, dim), (queries, batch, heads) and (keys, batch, dim), not "
            f"{tuple(q.shape)}, {tuple(weights.shape)} and {tuple(k.shape)}"
        )
    _check_devices(q, weights, k)


def _check_devices(*tensors: torch.Tensor) -> None:
    if len(devices := {str(each.device) for each in tensors}) > 1:
        raise ValueError(f"q, weights, k and grad must be on one device, not on {' and '.join(sorted(devices))}")


@torch.library.custom_op("megacpp_overlays::index_scores", mutates_args=())  # type: ignore[untyped-decorator]
def _scores(q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, use_relu: bool) -> torch.Tensor:
    return implementation(q.dtype, k.dtype, q.size(3), q.device).scores(q, weights, k, use_relu)


@torch.library.custom_op("megacpp_overlays::index_scores_gradients", mutates_args=())  # type: ignore[untyped-decorator]
def _gradients(
    grad: torch.Tensor, q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, use_relu: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    of_q, of_weights, of_k = implementation(q.dtype, k.dtype, q.size(3), q.device).gradients(
        grad, q, weights, k, use_relu
    )
    return of_q, of_weights, of_k


@_scores.register_fake  # type: ignore[untyped-decorator]
def _(q: torch.Tensor, _weights: torch.Tensor, k: torch.Tensor, _use_relu: bool) -> torch.Tensor:
    return q.new_empty((q.size(1), q.size(0), k.size(0)), dtype=torch.float32)


@_gradients.register_fake  # type: ignore[untyped-decorator]
def _(
    _grad: torch.Tensor, q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, _use_relu: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), weights.new_empty(weights.shape), k.new_empty(k.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.use_relu = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *_gradients(grad, *ctx.saved_tensors, ctx.use_relu), None


_scores.register_autograd(_backward, setup_context=_save)


@functools.cache
def implementation(q_dtype: torch.dtype, k_dtype: torch.dtype, dim: int, device: torch.device) -> ModuleType:
    """Return the module that computes: tensor cores where they take these inputs, else blocks in PyTorch."""
    if q_dtype == k_dtype == torch.bfloat16:
        # Asked for only here: the module needs a Triton that not every torch brings.
        try:
            tensor_cores = importlib.import_module("megacpp_overlays.kernels.index_scores.in_triton")
        except ImportError:
            return streaming
        if tensor_cores.takes(dim, device):
            return tensor_cores
    return streaming
