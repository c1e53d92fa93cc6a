"""Attentions whose norms of gradients are right without the overlay: on one rank, without sinks, and with sinks that are fixed, frozen
or marked by the core, or that belong to a subclass."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside, cpu_for_gpu, on_ranks

PACK = beside(__file__)
CONFIG = "megatron.core.transformer.transformer_config"


def _normed(
    ranks: int, sinks: str, *, frozen: bool = False, marked: bool = False, inherited: bool = False
) -> Mapping[str, object]:
    """Return the norm of gradients, the output and clipped gradients of an attention on so many ranks.

    Args:
        ranks: of tensor parallelism.
        sinks: the type of softmax.
        frozen: whether sinks are not trained.
        marked: whether the core says that it has those of its own heads.
        inherited: whether the attention is a subclass that calls its base.
    """
    module = PACK._module()

    def run(_: int) -> Mapping[str, Any]:
        from megatron.core import parallel_state

        settings: Any = importlib.import_module(CONFIG)
        theirs = settings.TransformerConfig
        settings.TransformerConfig = lambda **given: theirs(**{**given, "softmax_type": sinks})
        if marked:
            core: Any = importlib.import_module(PACK.CORE)
            core.DotProductAttention = _marking(core.DotProductAttention)
        if inherited:
            module.SelfAttention = _inheriting(module.SelfAttention)
        with cpu_for_gpu():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
            attention = PACK._build(module, ranks)
            if frozen:
                attention.core_attention.softmax_offset.requires_grad_(requires_grad=False)
            return _clipped(attention)

    return on_ranks(ranks, run)


def _marking(base: Any) -> Any:
    class Core(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            marks = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}
            for name, value in marks.items():
                setattr(self.softmax_offset, name, value)

    return Core


def _inheriting(base: Any) -> Any:
    class Attention(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    return Attention


def _clipped(attention: Any) -> dict[str, Any]:
    import torch
    from megatron.core import parallel_state
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    generator = torch.Generator().manual_seed(2)
    hidden, slope = (torch.randn(PACK.TOKENS, 1, PACK.HIDDEN, generator=generator) for _ in range(2))
    output, _ = attention(hidden, torch.ones(1, 1, PACK.TOKENS, PACK.TOKENS).triu(1).bool())
    (output * slope).sum().backward()
    trained = {name: each for name, each in attention.named_parameters() if each.requires_grad}
    settings = OptimizerConfig(optimizer="sgd", clip_grad=PACK.LIMIT)
    optimizer = FP32Optimizer(torch.optim.SGD(trained.values(), lr=1.0), settings, lambda *_: None)
    optimizer.grad_stats_parallel_group = parallel_state.get_model_parallel_group()
    optimizer.tp_group = parallel_state.get_tensor_model_parallel_group()
    norm = optimizer.clip_grad_norm(PACK.LIMIT)
    learnt = {f"clipped gradient of {name}": each.grad for name, each in trained.items()}
    return {"norm": norm, "output": output, **learnt}


def _neighbour(name: str, ranks: int, sinks: str, **asked: bool) -> Neighbour:
    return Neighbour(name=name, overlay="tp-attention-sinks", run=functools.partial(_normed, ranks, sinks, **asked))


NEIGHBOURS = (
    _neighbour("one-rank", 1, "learnable"),
    _neighbour("no-sinks", 2, "vanilla"),
    _neighbour("fixed-sinks", 2, "off-by-one"),
    _neighbour("frozen-sinks", 2, "learnable", frozen=True),
    _neighbour("marked-sinks-of-a-subclass", 2, "learnable", marked=True, inherited=True),
)
