"""Multi-latent attention that learns rightly without the overlay: on one rank, where each rank has a part of the sequence, and all
that lies beside the rotary keys."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside, on_ranks

PACK = beside(__file__)
BESIDE = "linear_q_down_proj", "linear_q_up_proj", "linear_kv_up_proj", "linear_proj"
"""Weights whose gradients no rotary key has a share in."""


def _learnt(ranks: int, *, columns: bool = False, parts: bool = False, of: tuple[str, ...]) -> Mapping[str, object]:
    """Return the output of an attention and the gradients of some of its weights."""
    return _on_ranks(ranks, columns, parts, lambda attention: _trained(attention, of))


def _frozen(ranks: int, *, columns: bool) -> Mapping[str, object]:
    """Return the same where keys get no gradient, because their down projection is frozen."""

    def run(attention: Any) -> Mapping[str, Any]:
        attention.linear_kv_down_proj.weight.requires_grad_(False)
        return _trained(attention, BESIDE)

    return _on_ranks(ranks, columns, False, run)


def _without_gradients(ranks: int, *, columns: bool, parts: bool) -> Mapping[str, object]:
    """Return the output of an attention that is evaluated."""

    def run(attention: Any) -> Mapping[str, Any]:
        import torch

        attention.eval()
        with torch.no_grad():
            return {"output": attention(_row(attention, 2)[0], None)[0]}

    return _on_ranks(ranks, columns, parts, run)


def _trained(attention: Any, of: tuple[str, ...]) -> Mapping[str, Any]:
    hidden, weights = _row(attention, 2)
    output, _ = attention(hidden, None)
    (output * weights).sum().backward()
    parameters = dict(attention.named_parameters())
    return {"output": output, **{f"gradient of {name}": parameters[f"{name}.weight"].grad for name in of}}


def _row(attention: Any, seed: int) -> Any:
    """Return hidden states and what their outputs weigh, [tokens, 1, hidden]; a rank of a sequence has its part of both."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    row = [torch.randn(PACK.TOKENS, 1, PACK.HIDDEN, generator=generator) for _ in range(2)]
    ranks = attention.config.tensor_model_parallel_size if attention.config.sequence_parallel else 1
    return [each.chunk(ranks)[torch.distributed.get_rank() % ranks] for each in row]


def _on_ranks(ranks: int, columns: bool, parts: bool, run: Callable[[Any], Mapping[str, Any]]) -> Mapping[str, object]:
    module = PACK._module()

    def on_rank(_: int) -> Mapping[str, Any]:
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
        return run(PACK._build(module, columns=columns, parts=parts, ranks=ranks))

    return on_ranks(ranks, on_rank)


def _neighbour(name: str, run: Callable[..., Mapping[str, object]], ranks: int, **options: Any) -> Neighbour:
    return Neighbour(name=name, overlay="mla-rope-key-gradient", run=functools.partial(run, ranks, **options))


NEIGHBOURS = (
    _neighbour("one-rank", _learnt, 1, of=(*BESIDE, PACK.DOWN)),
    _neighbour("parts-of-a-sequence", _learnt, 2, parts=True, of=(*BESIDE, PACK.DOWN)),
    _neighbour("replicas-beside-rotary-keys", _learnt, 2, of=BESIDE),
    _neighbour("frozen-columns", _frozen, 2, columns=True),
    _neighbour("columns-without-gradients", _without_gradients, 2, columns=True, parts=True),
)
