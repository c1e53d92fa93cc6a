"""Probe layers that un-flatten packed samples for their MoE router: a rank may hold a shard of them alone.

A packed microbatch of several samples is one row of all their tokens. `TransformerLayer._maybe_unflatten_for_moe` gives it an axis of
samples back, so that the router balances each of them. It counts samples in what the layer holds, with the length that a sample has
on all ranks. Under sequence parallelism a layer holds one of as many shards as there are tensor parallel ranks.

The verdict rests on the methods that un-flatten, on what calls them, and on the loss with what calls it, counts for it and multiplies; that
of an MoE layer also on its `forward` and `route`.

Source: https://github.com/NVIDIA/Megatron-LM/pull/5996
"""

from __future__ import annotations

from collections.abc import Callable

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

LAYER = "TransformerLayer"
UNFLATTEN = f"{LAYER}._maybe_unflatten_for_moe"
LOSS = "TopKRouter._apply_seq_aux_loss"
TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.transformer_layer", symbol=UNFLATTEN)
ROUTER_TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.moe.router", symbol=LOSS)
EXPERTS = "MoELayer.forward"
EXPERTS_TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.moe.moe_layer", symbol=EXPERTS)
"""Defers routing to a recomputation, which runs in the backward pass."""
PARAMS = "megatron.core.packed_seq_params"
IN_THE_SHARD = "counted-in-the-shard"
IN_THE_SHARD_OF_DEV = "counted-in-the-shard-before-the-bias"

_ABSENT_WITHOUT = {f"{PARAMS}:PackedSeqParams.tokens_per_sample": "a row does not say how long its samples are"}


def _probe_of(target: Target) -> Callable[[SourceTree], Finding]:
    """Return the probe of a layer that counts samples in its shard, of what a router does about it, or of what an MoE layer recomputes."""
    return lambda tree: forms.finding("seq-aux-loss-packed", target, tree, _ABSENT_WITHOUT)


probe, probe_router, probe_experts = map(_probe_of, (TARGET, ROUTER_TARGET, EXPERTS_TARGET))
