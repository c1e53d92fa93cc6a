"""Probe whether layers count packed samples for their MoE router in a sequence parallel shard.

A packed microbatch is one row with the tokens of several samples. `TransformerLayer._maybe_unflatten_for_moe` restores the axis of
samples, so that the router balances each sample. It divides the tokens that the layer holds by the full length of a sample. Under
sequence parallelism the layer holds only one shard of the row, of as many as there are tensor parallel ranks.

The verdict rests on the methods that un-flatten and their callers, and on the loss with its callers, counts and factors; that of an MoE
layer also on its `forward` and `route`.

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
"""An MoE layer may run its router again in the backward pass, to recompute."""
PARAMS = "megatron.core.packed_seq_params"
IN_THE_SHARD = "counted-in-the-shard"
IN_THE_SHARD_OF_DEV = "counted-in-the-shard-before-the-bias"

_ABSENT_WITHOUT = {f"{PARAMS}:PackedSeqParams.tokens_per_sample": "a row does not say how long its samples are"}


def _probe_of(target: Target) -> Callable[[SourceTree], Finding]:
    """Return the probe of one part: the layer, the router or the MoE layer."""
    return lambda tree: forms.finding("seq-aux-loss-packed", target, tree, _ABSENT_WITHOUT)


probe, probe_router, probe_experts = map(_probe_of, (TARGET, ROUTER_TARGET, EXPERTS_TARGET))
