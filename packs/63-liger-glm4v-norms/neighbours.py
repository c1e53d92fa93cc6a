"""Liger's kernels that are right without the overlay: other models, models that are built later, forward passes, and models whose norms are left alone."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, TargetAbsent, beside

PACK = beside(__file__)


def _evaluated() -> Mapping[str, object]:
    """Return logits of a model in float32 and in bfloat16."""
    import torch

    tokens = torch.arange(3, 15).view(2, 6)
    found = {}
    for dtype in ("float32", "bfloat16"):
        with torch.no_grad():
            found[dtype] = PACK.applied_to_instance(PACK.model(dtype), **PACK.KERNELS)(tokens, use_cache=False).logits
    return found


def _norms_left() -> Mapping[str, object]:
    return {**PACK.gradients(PACK.applied(PACK.model(), rms_norm=False, **PACK.KERNELS))}


def _built_later() -> Mapping[str, object]:
    """Return gradients of a model that is built after Liger's classes are in."""
    with PACK.classes_kept():
        PACK.functions().apply_liger_kernel_to_glm4v(**PACK.KERNELS)
        return {**PACK.gradients(PACK.model())}


def _other_model(name: str) -> Mapping[str, object]:
    """Return gradients of a model of another type, whose norms are as it needs them."""
    import torch

    transformers, functions = importlib.import_module("transformers"), PACK.functions()
    if not hasattr(functions, f"apply_liger_kernel_to_{name.lower()}"):
        raise TargetAbsent(f"Liger does not know {name}")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "attn_implementation": "eager"}
    configuration = getattr(transformers, f"{name}Config")(**sizes, **heads)
    with torch.random.fork_rng([]):
        torch.manual_seed(63)
        model = getattr(transformers, f"{name}ForCausalLM")(configuration).float()
    return {**PACK.gradients(_applied_to_other(functions, model))}


def _applied_to_other(functions: Any, model: Any) -> Any:
    with PACK.classes_kept(type(model).__module__):
        functions._apply_liger_kernel_to_instance(model=model, rope=False, **PACK.KERNELS)
    return model


_of = functools.partial(Neighbour, overlay=PACK.OVERLAY)
NEIGHBOURS = (
    _of(name="evaluated", run=_evaluated),
    _of(name="norms-left-alone", run=_norms_left),
    _of(name="built-later", run=_built_later),
    _of(name="glm4", run=functools.partial(_other_model, "Glm4")),
    _of(name="qwen3", run=functools.partial(_other_model, "Qwen3")),
)
