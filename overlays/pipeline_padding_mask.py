"""Sequence parallel split of the padding mask of Megatron's `GPTModel` on all pipeline stages, in the model's own group.

Upstream splits the mask on the stage that embeds tokens, and for the ranks of the process's default tensor parallel group. Other stages give
their MoE routers the mask of all tokens with a rank's shard of the tokens, which ends in an error. On dev MoE layers split such a mask
themselves, for the ranks of the default group as well.

Upstream's method runs without the mask, and the rank's part of the mask is put into its result. The mask is split only where it is as long as
the shards of all ranks together: a mask that the caller has split, or of any other length, is unchanged. On the stage that embeds,
with the default group, upstream splits it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import pipeline_padding_mask as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime.bare_instances import bare

_PLACE = 5
"""Position of the mask in upstream's result."""


def _make(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def _preprocess(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        model, mask = given.arguments["self"], given.arguments.get("padding_mask")
        if mask is None or not model.config.sequence_parallel:
            return original(*args, **kwargs)
        group, states = model.pg_collection.tp, given.arguments.get("decoder_input")
        if states is None and model.pre_process:
            if group is _default_group():
                return original(*args, **kwargs)
            ids = given.arguments["input_ids"]
            if mask.shape != ids.shape:
                raise AssertionError(f"padding_mask shape {mask.shape} does not match input_ids shape {ids.shape}")
            rows = mask.shape[1] // group.size()
        else:
            states = model.decoder.input_tensor if states is None else states
            rows = mask.shape[1] if states is None else states.shape[0]
        given.arguments["padding_mask"] = None
        found = original(*given.args, **given.kwargs)
        return (*found[:_PLACE], _own(mask, rows, group), *found[_PLACE + 1 :])

    return _preprocess


def _default_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group(check_initialized=False)


def _own(mask: Any, rows: int, group: Any) -> Any:
    """Return the part of a mask, [batch, tokens], that is of a rank's rows, or the mask where it is not one of all ranks."""
    if mask.shape[1] != rows * group.size():
        return mask
    return mask.chunk(group.size(), dim=1)[group.rank()].contiguous()


_TOKENS, _RANKS = 4, 2


def observe(module: ModuleType) -> Observation:
    """Let a stage that embeds nothing, of a model with tensor parallel ranks, take a mask of all tokens, on each of two ranks."""
    import torch

    mask = torch.arange(_TOKENS, device="cpu")[None] >= _TOKENS - 1
    found, right = [], []
    for rank in range(_RANKS):
        rows = torch.zeros(_TOKENS // _RANKS, 1, 1, dtype=torch.float32, device="cpu")
        model = bare(
            module.GPTModel,
            pre_process=False,
            config=SimpleNamespace(sequence_parallel=True, multi_latent_attention=True, cuda_graph_impl="none"),
            pg_collection=SimpleNamespace(tp=SimpleNamespace(size=lambda: _RANKS, rank=lambda rank=rank: rank)),
            position_embedding_type="none",
            decoder=SimpleNamespace(input_tensor=rows),
        )
        prepared = model._preprocess(  # noqa: SLF001 - the replaced method
            input_ids=None, position_ids=None, padding_mask=mask
        )
        found.append([int(each) for each in prepared[_PLACE].flatten()])
        right.append([int(each) for each in mask[0].chunk(_RANKS)[rank]])
    return Observation(
        broken=found != right, seen=f"masks of two ranks with two tokens each: {found} where {right} is right"
    )


OVERLAY = Overlay(
    id="pipeline-padding-mask",
    pack=34,
    title="cut padding masks for sequence parallelism on every pipeline stage",
    target=feature.TARGET,
    probe=feature.probe,
    replacements=dict.fromkeys(
        (feature.FIRST_STAGE, feature.DEFAULT_GROUP), (Replacement(symbol=feature.PREPROCESS, make=_make),)
    ),
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "shape mismatch in MoE layers behind the first pipeline stage",
        "padding mask fails with pipeline and sequence parallelism",
    ),
    concerns="experts and sequence_parallel and tensor_parallel",
    breaks="with sequence and pipeline parallelism MoE layers behind the first stage end in an error under a padding mask",
    brief="padding masks of later stages",
    until="_preprocess cuts on all stages",
    retire_when="GPTModel._preprocess cuts the padding mask on every pipeline stage, in the model's own group",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=5563, state="closed, opened 2026-06-29, seen 2026-11-23"),
        Thread(repository="NVIDIA/Megatron-LM", number=5088, state="open, opened 2026-06-01, seen 2026-11-23"),
    ),
    last_validated="2026-11-23, x86-64 without GPU, torch 2.11.0: megatron-core 0.16.1, 0.18.2 and 0.19.2, main d98e8a64dd and dev d48bd6be0a "
    "on two gloo ranks; 0.16.0 to 0.19.2 read",
)
