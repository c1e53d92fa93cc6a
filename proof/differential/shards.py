"""Whole parameters from the shards of all ranks, and shards from whole parameters, as Megatron's own checkpoints cut them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

Whole = dict[str, torch.Tensor]


def shards_of(model: Any) -> Iterator[ShardedTensor]:
    """Yield the shards of a model's checkpoint on this rank; their data are views of parameters."""
    from megatron.core import parallel_state

    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    yield from _flat(model.sharded_state_dict(metadata=groups))


def _flat(found: Any) -> Iterator[ShardedTensor]:
    if isinstance(found, ShardedTensorFactory):
        yield from _flat(found.build())
    elif isinstance(found, ShardedTensor):
        yield found
    elif isinstance(found, dict):
        for each in found.values():
            yield from _flat(each)
    elif isinstance(found, list):
        for each in found:
            yield from _flat(each)


def fill(model: Any, seed: int = 0) -> None:
    """Let a model have its shares of the same weights, whatever its number of ranks."""
    with torch.no_grad():
        for shard in shards_of(model):
            if _has_numbers(shard):
                whole = drawn(shard.key, tuple(shard.global_shape), seed)
                shard.data.copy_(whole[shard.global_slice()].view(shard.data.shape))


def drawn(key: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return the weights of a name, float64 rounded to half precision: every dtype of the table holds them exactly."""
    name = hashlib.sha256(f"{seed} {key}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(name[:6], "big"))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if "expert_bias" in key:
        values = values * 0
    values = 1 + values * 0.2 if "norm" in key and "weight" in key else values * 0.3
    return values.half().double()


def gathered(
    model: Any, read: Callable[[torch.nn.Parameter], torch.Tensor | None], *, since: int | None = None
) -> tuple[Whole, float]:
    """Return something of every parameter as whole tensors, and how far apart replicas of a shard are, of the largest value.

    Args:
        model: on this rank.
        read: returns the tensor of a parameter that is gathered, such as its gradient; None means zeros.
        since: the seed of the weights from which it is to be the distance, if it is one.
    """
    kept = [(each, each.data) for each in model.parameters()]
    try:
        for each, data in kept:
            found = read(each)
            wide = torch.float64 if data.dtype == torch.float64 else torch.float32
            each.data = torch.zeros_like(data) if found is None else found.detach().to(wide).clone()
        mine = [_piece(shard, since) for shard in shards_of(model) if _has_numbers(shard)]
    finally:
        for each, data in kept:
            each.data = data
    everything: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everything, mine)
    return _assembled([each for rank in everything for each in rank])


def _has_numbers(shard: ShardedTensor) -> bool:
    return shard.data is not None and bool(shard.data.is_floating_point())


def _piece(shard: ShardedTensor, since: int | None) -> tuple[Any, ...]:
    shape, place = tuple(shard.global_shape), shard.global_slice()
    data = shard.data.detach().double().cpu().clone()
    if since is not None:
        data -= drawn(shard.key, shape, since)[place].view(data.shape)
    return shard.key, shape, place, data


def _assembled(shards: list[Any]) -> tuple[Whole, float]:
    whole, there = {}, {}
    apart = 0.0
    for key, shape, place, data in shards:
        into = whole.setdefault(key, torch.zeros(shape, dtype=torch.float64))[place]
        has = there.setdefault(key, torch.zeros(shape, dtype=torch.bool))[place]
        data = data.view(into.shape)
        if bool(has.any()):
            apart = max(apart, float((into - data).abs().max()) / max(float(into.abs().max()), 1e-30))
        into.copy_(data)
        has.fill_(True)
    return whole, apart
