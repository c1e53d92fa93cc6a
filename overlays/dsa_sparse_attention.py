"""Sparse attention over the keys chosen by DSA's indexer, for absorbed attention without fused kernels.

Upstream multiplies every query with every key in float32, masks the keys that were not chosen, takes a softmax over all keys, and
multiplies with all values: several tensors of (batch, heads, queries, keys), and a mask of (batch, queries, keys). The
seam gathers the chosen keys (`megacpp_overlays.kernels.sparse_attention`), and holds no tensor that grows with queries times
keys. A slot counts where upstream's mask is finite: its index is no sentinel, and lies within the bounds of its query, or
under a finite value of the additive mask, which is added. Without bounds and mask, the mask is causal.

Values and gradients are upstream's to rounding. Differences:

- A key that a query chose twice counts twice here and once upstream. A top-k chooses no key twice.
- An index out of range of the keys is ignored here, and an error upstream.
- A NaN in a key that no query chose has no effect here; upstream's product of 0 and NaN spreads it.

A quantized query of Transformer Engine is dequantized once, with its gradient; upstream's first operation does that, too. A
quantized key is read in its stored format where the kernel supports it (`kernels.sparse_attention.transformer_engine_keys`), and
dequantized otherwise; numbers and gradients are the same. Arguments unlike those of Megatron's own callers go to upstream's function.
So does a call whose scores of all keys are small where the kernels were not measured, as on a CPU (see `kernels.measured.serves`).

Not covered: `unfused_dsa_fn`, for keys and values of each head, which gathers by itself since 0.19. Up to 0.18 it builds all
scores, but has as many key heads as query heads, for which multi-query attention is of no use.

Source: https://github.com/NVIDIA/Megatron-LM/pull/5246
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

from megacpp_overlays.feature_probes import dsa_sparse_attention as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime.large_results import watch, wave


class Slots(NamedTuple):
    """Keys chosen by queries, in the format of the kernel."""

    indices: Any
    """(batch, queries, slots), -1 where no key counts."""
    bias: Any
    """Added to the score of a slot, (batch, queries, slots); None without an additive mask."""


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    import torch

    from megacpp_overlays.kernels import measured
    from megacpp_overlays.kernels.sparse_attention import function as sparse_attention
    from megacpp_overlays.kernels.sparse_attention import transformer_engine_keys
    from megacpp_overlays.runtime import multi_query, quantized

    plain = (torch.Tensor, torch.nn.Parameter)
    kernel_dtypes = {torch.bfloat16, torch.float16}
    dtypes = {*kernel_dtypes, torch.float32}

    def attention(
        query: Any,
        key: Any,
        topk_indices: Any,
        softmax_scale: Any,
        v_channels: Any,
        mask: Any = None,
        varlen_starts: Any = None,
        varlen_ends: Any = None,
        key_positions: Any = None,
    ) -> Any:
        given = (topk_indices, softmax_scale, v_channels, mask, varlen_starts, varlen_ends, key_positions)
        if type(query) not in plain and quantized.is_quantized(query):
            query = quantized.dequantized(query)
        stored = None
        if type(key) not in plain and quantized.is_quantized(key):
            stored = transformer_engine_keys.read(key)
            key = quantized.dequantized(key) if stored is None else key
        slots = None
        if (
            multi_query.matches(query, key, topk_indices, softmax_scale, v_channels)
            and query.dtype in dtypes
            and measured.serves(query, kernel_dtypes, query.shape[:3].numel() * key.size(0))
        ):
            slots = _counted(query, key, topk_indices, mask, varlen_starts, varlen_ends, key_positions)
        if slots is None:
            return original(query, key if stored is None else quantized.dequantized(key), *given)
        keys = key if stored is None else stored
        return sparse_attention.attend(query, keys, slots.indices, softmax_scale, v_channels, bias=slots.bias)[0]

    return attention


def _taken(query: Any, key: Any, topk_indices: Any) -> Any:
    """Return the indices on the device of the query."""
    from megacpp_overlays.kernels.sparse_attention import function as sparse_attention
    from megacpp_overlays.runtime import multi_query
    from megacpp_overlays.variables import SPARSE_ATTENTION_CHOICES, chosen

    indices = multi_query.to_take(topk_indices, query.device)
    if chosen(SPARSE_ATTENTION_CHOICES) == "check":  # before masks: a wrong index is an error even if masked
        sparse_attention.check_choices(indices, key.size(0))
    return indices


def _read(query: Any, key: Any, topk_indices: Any) -> tuple[Any, Any, Any]:
    """Return the indices on the device of the query, whether each is a valid key, and the indices clamped to valid keys as int64."""
    indices = _taken(query, key, topk_indices)
    return indices, (indices >= 0) & (indices < key.size(0)), indices.clamp(0, key.size(0) - 1).long()


def _counted(
    query: Any, key: Any, topk_indices: Any, mask: Any, starts: Any, ends: Any, positions: Any
) -> Slots | None:
    """Return the slots that count, by the bounds, the mask, or neither; None for masks of another kind."""
    if starts is not None:
        return _within_bounds(query, key, topk_indices, mask, starts, ends, positions)
    if mask is not None:
        return _under_a_mask(query, key, topk_indices, mask)
    return _causal(query, key, topk_indices)


def _chosen(indices: Any, counts: Any, bias: Any = None) -> Slots:
    return Slots(indices.where(counts, -1), bias)


def _within_bounds(
    query: Any, key: Any, topk_indices: Any, mask: Any, starts: Any, ends: Any, positions: Any
) -> Slots | None:
    """Return the slots whose key is at a position from `starts` up to, not including, `ends` of its query."""
    bounds = [each for each in (starts, ends, positions) if each is not None]
    rows = (query.size(0),)
    if mask is not None or ends is None or any(each.is_floating_point() for each in bounds):
        return None
    if starts.shape != rows or ends.shape != rows or (positions is not None and positions.shape != (key.size(0),)):
        return None
    starts, ends = (each.to(query.device)[:, None] for each in (starts, ends))
    if positions is None:  # the bounds are key indices: an index within them is a valid key
        indices = _taken(query, key, topk_indices)
        return _chosen(indices, (indices >= starts.clamp(min=0)) & (indices < ends.clamp(max=key.size(0))))
    indices, is_key, safe = _read(query, key, topk_indices)
    safe = positions.to(query.device)[safe]
    return _chosen(indices, is_key & (safe >= starts) & (safe < ends))


def _under_a_mask(query: Any, key: Any, topk_indices: Any, mask: Any) -> Slots | None:
    """Return the slots under a finite value of an additive mask, which is added."""
    import torch

    whole = (query.size(0), key.size(0))
    if mask.dtype != torch.float32 or mask.device != query.device or mask.requires_grad:
        return None
    if mask.shape not in {whole, (query.size(1), *whole)}:
        return None
    indices, is_key, safe = _read(query, key, topk_indices)
    bias = mask.expand(query.size(1), *whole).gather(-1, safe)
    finite = bias.isfinite()
    return _chosen(indices, is_key & finite, bias.masked_fill(~finite, 0.0))


def _causal(query: Any, key: Any, topk_indices: Any) -> Slots:
    """Return the slots of keys up to the place of their query."""
    import torch

    indices, is_key, safe = _read(query, key, topk_indices)
    return _chosen(indices, is_key & (safe <= torch.arange(query.size(0), device=query.device)[:, None]))


_QUERIES, _BATCH, _HEADS, _KEYS, _DIM, _VALUE, _SLOTS = 5, 2, 16, 12, 3, 2, 3
_BOUND = _QUERIES * _BATCH * _HEADS * _KEYS
_SCALE = 0.5
_TOLERANCE = 1e-3
"""Relative, in the Euclidean norm: far above float32 rounding and below that of any narrower type."""


def _measure(module: ModuleType) -> tuple[list[str], str | None]:
    """Return the operators whose result is as large as all scores, and the first result that is wrong.

    On CPU tensors, and independent of settings of the importing thread: no random numbers, no autocast, and no autograd, whose
    engine asks the driver for devices when it starts.
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
        query, key = wave(_QUERIES, _BATCH, _HEADS, _DIM), wave(_KEYS, _BATCH, 1, _DIM)
        large: list[str] = []
        for name, chosen, options, slots in _cases():
            with watch(_BOUND, large):
                found = getattr(module, feature.FUNCTION)(query, key, chosen, _SCALE, _VALUE, **options)
            true, _ = reference.attend(query.double(), key.double(), slots.indices, _SCALE, _VALUE, bias=slots.bias)
            if found.shape != true.shape or found.dtype != torch.float32:
                return large, f"{name}: {found.dtype} of {tuple(found.shape)}"
            if not (away := ((found - true).norm() / true.norm()).item()) < _TOLERANCE:
                return large, f"{name}: {away:.1e} away from the definition"
    return large, None


def _cases() -> Iterator[tuple[str, Any, dict[str, Any], Slots]]:
    """Yield a name, indices with sentinels among them, the masks of a call, and the expected slots that count."""
    import torch

    rows = torch.arange(_QUERIES, device="cpu")
    places = torch.arange(_SLOTS, device="cpu")
    chosen = (rows[:, None] * 2 + places * 4) % _KEYS
    chosen = torch.stack([chosen, chosen.flip(0)])
    chosen[1, 0, 1], chosen[0, 3] = -1, -1  # one slot of a query, and all of another
    yield "causal", chosen, {}, Slots(chosen.masked_fill(chosen > rows[:, None], -1), None)
    starts, ends = rows.clamp(max=2), rows + 7
    positions = torch.arange(_KEYS, device="cpu").flip(0)
    at = positions[chosen.clamp(min=0)]
    outside = (at < starts[:, None]) | (at >= ends[:, None])
    bounds = {"varlen_starts": starts, "varlen_ends": ends, "key_positions": positions}
    yield "within bounds", chosen, bounds, Slots(chosen.masked_fill(outside, -1), None)
    mask = wave(_BATCH, _QUERIES, _KEYS)
    mask[mask > 0.5] = float("-inf")
    bias = mask.gather(-1, chosen.clamp(min=0))
    hidden = bias == float("-inf")
    yield "masked", chosen, {"mask": mask}, Slots(chosen.masked_fill(hidden, -1), bias.masked_fill(hidden, 0.0))


def _witness(module: ModuleType) -> Observation:
    large, wrong = _measure(module)
    if wrong is not None:
        return Observation(broken=False, seen=f"its result differs from that of the replacement: {wrong}")
    return Observation(broken=bool(large), seen=_said(large))


def _self_test(module: ModuleType) -> Observation:
    large, wrong = _measure(module)
    return Observation(broken=bool(large or wrong), seen=wrong or _said(large))


def _said(large: list[str]) -> str:
    names = ", ".join(dict.fromkeys(large))
    return f"{len(large)} operators return all {_BOUND} scores or more{f': {names}' * bool(names)}"


OVERLAY = Overlay(
    id="dsa-sparse-attention",
    pack=47,
    title="attend to the keys that DSA's indexer chose without building scores of all keys",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.ALL_KEYS: (Replacement(symbol=feature.FUNCTION, make=_make),)},
    unsupported={},
    witness=_witness,
    self_test=_self_test,
    opt_in=False,
    symptoms=(
        "step takes tens of GB in sparse attention",
        "out of memory in DSA without fused kernels",
        "sparse attention is as slow as attention to all keys",
    ),
    concerns="dsa",
    breaks="absorbed DSA attention needs several float32 tensors of (batch, heads, queries, keys), and reads all keys for each query",
    brief="the memory of DSA's attention",
    until="Megatron builds no such tensor",
    retire_when="no supported Megatron builds scores of all keys for absorbed attention",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=3674, state="closed 2026-06-17, superseded by 5243 to 5247"),
        Thread(repository="NVIDIA/Megatron-LM", number=5246, state="merged 2026-06-25, brought the function"),
        Thread(repository="NVIDIA/Megatron-LM", number=5099, state="merged 2026-07-08, adds a cuDNN backend"),
        Thread(repository="NVIDIA/Megatron-LM", number=5049, state="merged 2026-07-24, adds a TileLang backend"),
        Thread(
            repository="NVIDIA/Megatron-LM", number=3044, state="open when last seen, fused kernels for absorbed MLA"
        ),
        Thread(
            repository="NVIDIA/Megatron-LM",
            number=7152,
            state="open when last seen, opened 2026-09-08: kernels for a simplified DSA with grouped queries",
        ),
        Thread(
            repository="NVIDIA/Megatron-LM",
            number=5703,
            state="closed when last seen, opened 2026-07-08: no backend but none, and its throughput",
        ),
    ),
    last_validated="2026-11-24, x86-64 without GPU, torch 2.11.0: megatron-core 0.19.0 to 0.19.2, main d98e8a64dd and dev d48bd6be0a",
)
