"""Absorbed attention of any channels, heads and top-k where the TileLang backend of DSA declines it.

The backend has one kernel, for 576 and 512 channels, heads in powers of two, indices in blocks of 64, and bfloat16. For
other inputs, and where TileLang is not installed, its dispatcher returns None, and the caller builds all scores. The
seam calls the dispatcher first. Where it declines, bfloat16 and float16 tensors of matching shapes go to
`megacpp_overlays.kernels.sparse_attention`, which supports them all. Calls that the dispatcher accepts are unchanged.

Masks were applied to the indices before: backends get no mask, and skip an index below 0, here as in their kernels.
That also holds for indices of the indexer without a kernel.

The seam is on the function through which the backend calls the dispatcher, since `fp8-quantized-unwrap` (pack 03) replaces
the dispatcher itself. Both may be active, in either order. A quantized query or key goes to the dispatcher first. A call that
it declines is served where the key can be read in its stored format (`kernels.sparse_attention.transformer_engine_keys`). Otherwise it
returns None to the caller as before. So does a call whose scores of all keys are small where the kernels were not measured (see
`kernels.measured.serves`).

Source: https://github.com/NVIDIA/Megatron-LM/pull/5049
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from megacpp_overlays.feature_probes import sparse_mla_dimensions as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime.large_results import wave


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    import torch

    from megacpp_overlays.kernels import measured
    from megacpp_overlays.kernels.sparse_attention import function as sparse_attention
    from megacpp_overlays.kernels.sparse_attention import transformer_engine_keys
    from megacpp_overlays.runtime import multi_query

    plain, dtypes = {torch.Tensor, torch.nn.Parameter}, {torch.bfloat16, torch.float16}

    def attention(query: Any, key: Any, topk_indices: Any, softmax_scale: Any, v_channels: Any) -> Any:
        output = original(query, key, topk_indices, softmax_scale, v_channels)
        if output is not None or not all(isinstance(each, torch.Tensor) for each in (query, key)):
            return output
        if not measured.serves(query, dtypes, query.shape[:-1].numel() * key.size(0)):
            return None
        if type(key) not in plain:
            return transformer_engine_keys.attend(query, key, topk_indices, softmax_scale, v_channels)
        if type(query) not in plain:
            return None
        is_known = multi_query.matches(query, key, topk_indices, softmax_scale, v_channels)
        if not is_known or query.dtype not in dtypes:
            return None
        indices = multi_query.to_take(topk_indices, query.device)
        return sparse_attention.attend(query, key, indices, softmax_scale, v_channels)[0]

    return attention


_QUERIES, _BATCH, _KEYS, _SCALE = 3, 2, 7, 0.25
_DIMENSIONS = (("48 channels", 3, 48, 32, 5), ("32 channels, no power of two of heads", 6, 32, 32, 4))
"""Cases that no kernel of the backend supports: a name, heads, channels of keys and of values, and slots."""
_TOLERANCE = 2e-2
"""Relative, in the Euclidean norm: bfloat16 in and out."""


def observe(module: ModuleType) -> Observation:
    """Call the attention with channels, heads and slots that the backend's kernel does not support.

    On small CPU tensors, and never with a supported case: so the backend's kernel need not be installed, and is not called.
    """
    import torch

    from megacpp_overlays.kernels import measured
    from megacpp_overlays.kernels.sparse_attention import reference

    with (
        torch.inference_mode(mode=False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        measured.serving_calls_of_every_size(),
    ):
        for name, heads, dim, value, slots in _DIMENSIONS:
            query = wave(_QUERIES, _BATCH, heads, dim).bfloat16()
            key = wave(_KEYS, _BATCH, 1, dim).bfloat16()
            indices = torch.arange(_BATCH * _QUERIES * slots, device="cpu", dtype=torch.int32) * 3 % (_KEYS + 1) - 1
            indices = indices.view(_BATCH, _QUERIES, slots)
            output = getattr(module, feature.FUNCTION)(query, key, indices, _SCALE, value)
            if output is None:
                return Observation(broken=True, seen=f"{name}: declined, and the caller builds all scores")
            true, _ = reference.attend(query.double(), key.double(), indices, _SCALE, value)
            if output.shape != true.shape or not (away := float((output - true).norm() / true.norm())) < _TOLERANCE:
                return Observation(broken=True, seen=f"{name}: a wrong result of {tuple(output.shape)}")
    return Observation(broken=False, seen=f"{name}: computed, {away:.1e} away from the definition")


OVERLAY = Overlay(
    id="sparse-mla-dimensions",
    pack=2,
    title="serve sparse attention of any channels, heads and top-k where the TileLang backend of DSA declines it",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.ONE_KERNEL: (Replacement(symbol=feature.FUNCTION, make=_make),)},
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "sparse attention is slow although dsa_kernel_backend is tilelang",
        "out of memory in sparse attention with other than 576 and 512 channels",
        "step takes tens of GB in DSA with tilelang",
    ),
    concerns="dsa",
    breaks="with dsa_kernel_backend=tilelang a model of other than 576 and 512 channels, 48 heads or a top-k of 100 has no fused attention",
    brief="sparse attention of other dimensions",
    until="its kernels take them",
    retire_when="the TileLang backend takes any channels, heads and top-k, or is gone",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=5049, state="merged 2026-07-24, brought the dispatcher"),
        Thread(repository="NVIDIA/Megatron-LM", number=6279, state="open when last seen, the same files for dev"),
        Thread(
            repository="tile-ai/tilelang", number=348, state="open when last seen, other sizes in the dense MLA example"
        ),
    ),
    last_validated="2026-11-24, x86-64 without GPU, torch 2.11.0: megatron-core 0.19.0 to 0.19.2 and main d98e8a64dd",
)
