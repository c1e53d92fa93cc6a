"""Gradient of MLA's rotary keys, summed over the heads of all tensor parallel ranks.

In multi-latent attention the rotary part of a key, `k_pos_emb`, is the same for all heads. Each tensor parallel rank expands it over
its own heads, and upstream's gradient is that of these heads only. Where the down projection is replicated and sequence
parallelism is off, the replicas get different gradients and drift apart. Where it is split by columns, the rank with the rotary
columns learns from its own heads alone. Activations get such gradients, too, and so do all layers below.

Upstream's functions are called unchanged. Behind a replicated down projection, the gradient of its rotary columns
is summed over ranks. Split columns are gathered, as upstream gathers them right after, and with sequence parallelism are split along
the sequence, as upstream splits the latent columns. The result then equals that of a replicated down projection, and upstream sums its
gradient itself. The forward pass has upstream's bits. One rank, a replicated down projection with sequence parallelism, and calls that
need no gradient are unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import mla_rope_key_gradient as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime.gradients import gradients


def _behind(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _qkv_down_projection(self: Any, *args: Any, **kwargs: Any) -> Any:
        q_compressed, kv_combined = original(self, *args, **kwargs)
        return q_compressed, _of_all_heads(self, kv_combined, module)

    return _qkv_down_projection


def _within(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def get_query_key_value_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        def replace(_linear: Any, _given: Any, returned: Any) -> Any:
            kv_combined, *bias = returned
            return _of_all_heads(self, kv_combined, module), *bias

        hook = self.linear_kv_down_proj.register_forward_hook(replace)  # no other code of upstream runs in between
        try:
            return original(self, *args, **kwargs)
        finally:
            hook.remove()

    return get_query_key_value_tensors


def _of_all_heads(attention: Any, kv_combined: Any, module: ModuleType) -> Any:
    """Return the output of a down projection, with the gradient of its rotary columns summed over all heads.

    Args:
        attention: the attention with the projection.
        kv_combined: [s or s / ranks, b, latent and then rotary columns], or this rank's part of the columns.
        module: the target, which has upstream's mappings.
    """
    import torch

    group, config = _group(attention), attention.config
    if group is None or group.size() == 1 or not torch.is_grad_enabled():
        return kv_combined
    if kv_combined.size(-1) != config.kv_lora_rank + config.qk_pos_emb_head_dim:
        kv_combined = module.gather_from_tensor_model_parallel_region(kv_combined)
        if config.sequence_parallel:
            return module.scatter_to_sequence_parallel_region(kv_combined)
    elif config.sequence_parallel:
        return kv_combined
    return _summed().apply(kv_combined, config.kv_lora_rank, group)


def _group(attention: Any) -> Any:
    """Return the tensor parallel group: up to 0.15.3 the default group of upstream's helpers, the only one there."""
    if (group := getattr(attention, "tp_group", None)) is not None:
        return group
    from megatron.core.utils import get_tensor_model_parallel_group_if_none

    return get_tensor_model_parallel_group_if_none(None, check_initialized=False)


@functools.cache
def _summed() -> Any:
    """Return the autograd function that passes values on, and sums the gradient of columns from a given one on over ranks.

    Upstream's `copy_to_tensor_model_parallel_region` behind a split is no replacement: up to 0.18.2 it returns a gradient that is
    not contiguous unchanged.
    """
    import torch

    class SumOfColumns(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, values: Any, first: int, group: Any) -> Any:
            ctx.first, ctx.group = first, group
            return values.view_as(values)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            whole = gradients[0].clone(memory_format=torch.contiguous_format)
            part = whole[..., ctx.first :].contiguous()
            if ctx.group.size() > 1:
                torch.distributed.all_reduce(part, group=ctx.group)
            whole[..., ctx.first :] = part
            return whole, None, None

    return SumOfColumns


class _Group:
    """Stub of a process group: two ranks in the forward pass, and one in the backward, where requests for its size are counted."""

    def __init__(self) -> None:
        self.ranks, self.asked = 2, 0

    def size(self) -> int:
        self.asked += 1
        return self.ranks

    def rank(self) -> int:
        return 0


def observe(module: ModuleType) -> Observation:
    """Run a real attention of one head up to its keys, without sequence parallelism, on the CPU, and back from their rotary part.

    The constructor needs process groups, so the instance is built without it. There is no communication: the gradient is
    right where its sum over the group of ranks is requested.
    """
    import torch

    with torch.inference_mode(False), torch.enable_grad():
        return _observed(module)


def _observed(module: ModuleType) -> Observation:
    import torch

    def linear(wide: int, narrow: int) -> Any:
        layer = torch.nn.Identity()  # a linear layer would draw from the random numbers of the process
        layer.weight = torch.nn.Parameter(torch.ones(narrow, wide, dtype=torch.float32, device="cpu"))
        layer.register_forward_hook(lambda layer, given, _: (given[0] @ layer.weight.t(), None))
        return layer

    group, groups = _Group(), SimpleNamespace(cp=_Group(), tp=None)
    attention = object.__new__(module.MLASelfAttention)
    torch.nn.Module.__init__(attention)
    config = _Config(
        kv_lora_rank=2,
        qk_head_dim=2,
        qk_pos_emb_head_dim=2,
        v_head_dim=2,
        rope_type="rope",
        context_parallel_size=1,
        multi_latent_attention=True,
    )
    for name, value in {
        "config": config,
        "tp_group": group,
        "pg_collection": groups,
        "model_comm_pgs": groups,
        "num_attention_heads_per_partition": 1,
        "q_head_dim": 4,
        "recompute_up_proj": False,
        "cache_mla_latents": False,
        "rotary_pos_emb": _Positions(),
        "linear_q_proj": linear(2, 4),
        "linear_kv_down_proj": linear(2, 4),
        "linear_kv_up_proj": linear(2, 4),
        "q_layernorm": torch.nn.Identity(),
        "kv_layernorm": torch.nn.Identity(),
    }.items():
        setattr(attention, name, value)
    with _KnownWorldSize(module):
        _, key, *_ = attention.get_query_key_value_tensors(torch.ones(2, 1, 2, dtype=torch.float32, device="cpu"))
        group.ranks, group.asked = 1, 0
        (weight,) = gradients(key[..., config.qk_head_dim :].sum(), attention.linear_kv_down_proj.weight)
    kept = weight.tolist() == [[0.0, 0.0]] * 2 + [[2.0, 2.0]] * 2
    how = "asked for" if group.asked else "not asked for"
    return Observation(
        broken=not (group.asked and kept),
        seen=f"the sum over ranks of the gradient of two rotary keys is {how}; that of their weights is {weight.tolist()}",
    )


class _Config(SimpleNamespace):
    """Config whose missing attributes are None; upstream's own config would log deprecation warnings."""

    def __getattr__(self, name: str) -> None:
        return None


class _Positions:
    """Rotary embedding with angles of zero."""

    def get_rotary_seq_len(self, _context: Any, _block: Any, values: Any, *_: Any) -> int:
        return int(values.size(0))

    def __call__(self, length: int, **_: Any) -> Any:
        import torch

        return torch.zeros(length, 1, 1, 2, dtype=torch.float32, device="cpu")


class _KnownWorldSize:
    """Context that sets the number of tensor parallel ranks: up to 0.15.3 upstream reads it and raises where it is not set."""

    def __init__(self, module: ModuleType) -> None:
        state = getattr(module, "parallel_state", None)
        self._state = None if state is None or state.model_parallel_is_initialized() else state

    def __enter__(self) -> None:
        if self._state is not None:
            self._state.set_tensor_model_parallel_world_size(2)

    def __exit__(self, *_: object) -> None:
        if self._state is not None:
            self._state.set_tensor_model_parallel_world_size(None)


OVERLAY = Overlay(
    id="mla-rope-key-gradient",
    pack=25,
    title="Sum the gradient of MLA's shared rotary keys over the heads of all tensor parallel ranks",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={
        feature.WITHIN: (Replacement(symbol=feature.METHOD, make=_within),),
        feature.BEHIND: (
            Replacement(symbol=feature.DOWN, make=_behind),
            Replacement(symbol=feature.FUSED_DOWN, make=_behind),
        ),
    },
    unsupported={
        feature.COLUMNS_ALONE: "MLA of megatron-core 0.12 and 0.13 takes tensors that are not cut by columns for parts of the sequence: "
        "take 0.14.0 or newer, or train with one tensor parallel rank"
    },
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "replicas drift apart under tensor parallelism with MLA",
        "weights differ between tensor parallel ranks",
        "loss with TP is worse than without, with multi-latent attention",
    ),
    concerns="mla and tensor_parallel",
    breaks="with tensor parallelism MLA's down projections learn rotary keys from some heads only, and replicas drift apart",
    brief="gradients of MLA's rotary keys under TP",
    until="Megatron sums them over heads",
    retire_when="get_query_key_value_tensors sums the gradient of k_pos_emb over tensor parallel ranks wherever it is not "
    "gathered from parts of the sequence, down projections that are cut by columns included",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=6839, state="open, opened 2026-08-25, seen 2026-11-23"),
        Thread(repository="NVIDIA/Megatron-LM", number=1699, state="open, opened 2025-07-21, seen 2026-11-23"),
    ),
    last_validated="2026-11-23, x86-64 without GPU, torch 2.11.0: megatron-core 0.14.0, 0.16.1, 0.17.1, 0.18.2 and 0.19.2 on two "
    "and four gloo ranks; 0.12.0 to 0.19.2, main d98e8a64dd and dev d48bd6be0a read. H200, two NCCL ranks: 0.19.2",
)
