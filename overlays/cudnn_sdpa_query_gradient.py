"""Exclusion of cuDNN from attention of transformers where its backward pass fails: off unless its variable is `on`.

cuDNN scores the padding of the last tile of 128 keys with 0. Where 64 keys are in that tile and logits are near -120, the exponential of the difference overflows and gradients are
NaN. The same happens for a single query over a multiple of 64 keys. Such calls that record a gradient are computed by the other enabled backends, unless the backend masks later
keys itself, where cuDNN is right. Before that, cuDNN's backward pass is run once on such logits, for each device, dtype and size of heads: where it is right, no call is changed.

The overlay is off by default because other backends round differently and may be slower, and most models have no such logits.

Source: https://github.com/pytorch/pytorch/issues/196678, https://github.com/NVIDIA/cudnn-frontend/issues/1072
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from megacpp_overlays.feature_probes import cudnn_sdpa_query_gradient as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime import dynamo

_TILE, _LOGIT, _DEVICE = 128, -120.0, "cuda"


class _CudnnKernel(NamedTuple):
    """Key of a check: the properties of a call by which cuDNN chooses a backward kernel."""

    device: int
    dtype: Any
    size: int
    """Size of a head."""
    queries: int
    """1, or half a tile."""


_known: dict[_CudnnKernel, bool] = {}
"""Results of the checks of this process: whether gradients were finite."""


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    from torch.nn.attention import sdpa_kernel

    def sdpa_attention_forward(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *arguments: Any, **more: Any
    ) -> Any:
        others: tuple[Any, ...] = ()
        if _may_fail(query, key, value) and (arguments or not _hides(module, query, attention_mask, **more)):
            others = _others(query.device.index, query.dtype, *_sizes(query))
        if others:
            with sdpa_kernel(list(others)):
                return original(module, query, key, value, attention_mask, *arguments, **more)
        return original(module, query, key, value, attention_mask, *arguments, **more)

    return sdpa_attention_forward


def _may_fail(query: Any, key: Any, value: Any) -> bool:
    """Return whether a call records a gradient on a GPU and has lengths at which cuDNN may fail."""
    import torch

    if not (query.device.type == _DEVICE and torch.is_grad_enabled()) or query.is_nested or _is_exported():
        return False
    if not (query.requires_grad or key.requires_grad or value.requires_grad):
        return False
    rest = key.shape[-2] % _TILE
    return bool(rest == _TILE // 2 or (query.shape[-2] == 1 and rest == 0))


@dynamo.constant
def _is_exported() -> bool:
    """Return whether torch.export runs; Dynamo itself would say so of torch.compile, too."""
    import torch

    return bool(torch.compiler.is_exporting())


def _hides(
    module: Any, query: Any, mask: Any, is_causal: bool | None = None, position_bias: Any = None, **_: Any
) -> bool:
    """Return whether a backend hides later keys itself, without a mask: there cuDNN is right."""
    if mask is not None or position_bias is not None or query.shape[-2] == 1:
        return False
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _sizes(query: Any) -> tuple[int, int]:
    """Return the head size and number of queries of the check for a call: numbers that Dynamo knows."""
    return 64 if query.shape[-1] <= 64 else 128, 1 if query.shape[-2] == 1 else _TILE // 2


@dynamo.constant
def _others(device: int, dtype: Any, size: int, queries: int) -> tuple[Any, ...]:
    """Return the backends to choose from without cuDNN; empty where torch's choice is kept."""
    import torch
    from torch.nn.attention import SDPBackend

    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
    backends = torch.backends.cuda
    has_math, has_cudnn = backends.math_sdp_enabled(), backends.cudnn_sdp_enabled()
    if dtype not in {torch.float16, torch.bfloat16} or not (has_cudnn and has_math):  # math alone takes every call
        return ()
    if _is_right(_CudnnKernel(device, dtype, size, queries)):
        return ()
    is_on = {
        SDPBackend.FLASH_ATTENTION: backends.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: backends.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: has_math,
    }
    return tuple(each for each in is_on if is_on[each])


def _is_right(kernel: _CudnnKernel) -> bool:
    """Return whether cuDNN's backward pass is right, by a check that runs once."""
    import torch

    if kernel not in _known and not torch.cuda.is_current_stream_capturing():
        # A thread of its own has no modes, hooks or autocast of the caller.
        thread = threading.Thread(target=_ask, args=(kernel,))
        thread.start()
        thread.join()
    return _known.get(kernel, False)


def _ask(kernel: _CudnnKernel) -> None:
    """Run cuDNN's passes on few logits, with a mask and without one. A call that cuDNN refuses counts as failed."""
    import torch

    _known[kernel] = False
    lengths = (_TILE // 2, _TILE) if kernel.queries == 1 else (_TILE // 2,)
    with contextlib.suppress(Exception), torch.cuda.device(kernel.device):
        _known[kernel] = all(_is_finite(kernel, keys, mask) for keys in lengths for mask in (False, True))


def _is_finite(kernel: _CudnnKernel, keys: int, has_mask: bool) -> bool:
    """Return whether all gradients of two heads are finite, whose logits are all the same; cuDNN 9.26 may crash over one head of one query."""
    import torch

    def rows(count: int, number: float) -> Any:
        return torch.full((1, 2, count, kernel.size), number, dtype=kernel.dtype, device="cuda")

    given = rows(kernel.queries, 1.0), rows(keys, _LOGIT / kernel.size**0.5), rows(keys, 1.0)
    mask = given[0].new_zeros((1, 1, kernel.queries, keys)).expand(1, 2, -1, -1) if has_mask else None
    # Below the choice of backends, which is kept for the whole process, and without autograd, whose thread may be the one that waits.
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention  # noqa: SLF001
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward  # noqa: SLF001
    output, sums, of_queries, of_keys, *most, seed, offset, _ = forward(*given, mask, True)
    kept = (output, sums, seed, offset, mask, of_queries, of_keys, *most)
    found = backward(torch.ones_like(output), *given, *kept, 0.0, False)
    return all(bool(each.isfinite().all()) for each in found)


class _CudnnChosen(Exception):  # noqa: N818 - no error
    """Raised where upstream reads an attribute of the layer, with whether cuDNN may be chosen then."""


class _LayerThatTells:
    """Stub of a layer that reports whether cuDNN may be chosen."""

    def __getattr__(self, name: str) -> Any:
        import torch

        raise _CudnnChosen(torch.backends.cuda.cudnn_sdp_enabled())


def observe(module: ModuleType) -> Observation:
    """Call attention over half a tile of keys on a device whose cuDNN is known to fail, and observe which backends may be chosen."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernel = _CudnnKernel(-1, torch.bfloat16, 64, _TILE // 2)
    given = SimpleNamespace(
        is_nested=False,
        requires_grad=True,
        device=SimpleNamespace(type=_DEVICE, index=kernel.device),
        dtype=kernel.dtype,
        shape=(1, 1, kernel.queries, kernel.size),
    )
    _known[kernel] = False
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cuda", enabled=False),
            sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]),
        ):
            getattr(module, feature.TARGET.symbol)(_LayerThatTells(), given, given, given, given)
        broken = True
    except _CudnnChosen as asked:
        (broken,) = asked.args
    finally:
        del _known[kernel]
    return Observation(
        broken=broken, seen=f"where cuDNN's backward pass fails it may {'' if broken else 'not '}be chosen"
    )


OVERLAY = Overlay(
    id="cudnn-sdpa-query-gradient",
    pack=74,
    title="keep attention of transformers away from cuDNN where its backward pass fails",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.AS_TORCH_PREFERS: (Replacement(symbol=feature.TARGET.symbol, make=_make),)},
    unsupported={},
    witness=None,  # which cuDNN will be loaded, and on which GPU, is not known at an import
    self_test=observe,
    opt_in=True,
    symptoms=(
        "gradients are not finite on H100 or H200 and right with attn_implementation eager",
        "one step of DPO over padded batches in bfloat16 on Hopper makes grad_norm nan",
        "ScaledDotProductCudnnAttentionBackward0 returned nan values in its 0th output",
    ),
    concerns="every model",
    breaks="on Hopper cuDNN's backward pass of attention over 64 keys more than a multiple of 128 has NaN in the gradient of queries where logits are near -120",
    retire_when="no supported torch loads a cuDNN whose backward pass fails; the seam asks the one that is loaded, and leaves every call as it is where that is right",
    brief="NaN of cuDNN's attention",
    until="cuDNN's backward pass is right",
    threads=(
        Thread(repository="pytorch/pytorch", number=196678, state="closed, reported 2026-09-11"),
        Thread(repository="huggingface/trl", number=7181, state="open, reported 2026-09"),
        Thread(repository="NVIDIA/cudnn-frontend", number=1072, state="open, reported 2026-09-15: one query"),
        Thread(repository="NVIDIA/cudnn-frontend", number=628, state="closed: a test of cuDNN's repair"),
    ),
    last_validated="2026-11-30, H200, torch 2.11.0 with cuDNN 9.19: transformers 5.23.0; 5.0.0 to 5.24.0 read",
)
