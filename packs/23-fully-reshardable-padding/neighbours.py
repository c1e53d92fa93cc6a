"""Checkpoints of Megatron's DistributedOptimizer that are right without the overlay: of buckets with nothing behind them, of one bucket, in
formats that are cut elsewhere, and read back."""

from __future__ import annotations

import functools
import gc
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, TargetAbsent, beside, on_ranks

PACK = beside(__file__)
FULL = ((128, 16), (128, 32), (128, 16))
"""Weights that fill buckets with their biases: 17, 33 and 17 times 128 elements."""
ONE = ((9, 7), (31, 20))
"""Weights of a bucket that is padded at its end."""
PADDED = PACK.SHAPES[:4]
GATHERED = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": True}
IN_PARTS = {"distrib_optim_sharding_type": "dp_reshardable"}
MOST = 2_000
"""Numbers of a tensor that are compared, from its start and from its end."""


def _saved(ranks: int, shapes: Any) -> Mapping[str, object]:
    """Return what an optimizer hands to a fully reshardable checkpoint after two steps."""
    return _on_ranks(ranks, shapes, lambda model, optimizer: _numbers(_state(model, optimizer, GATHERED), "state"))


def _otherwise(shapes: Any) -> Mapping[str, object]:
    """Return what an optimizer hands to a checkpoint in parts, and what it gathers for one of Megatron's own files."""

    def run(model: Any, optimizer: Any) -> Iterator[tuple[str, Any]]:
        yield from _numbers(_state(model, optimizer, IN_PARTS), "in parts")
        yield from _numbers(optimizer.get_parameter_state_dp_zero(), "gathered")

    return _on_ranks(1, shapes, run)


def _read_back(shapes: Any) -> Mapping[str, object]:
    """Return what an optimizer holds that trained on after its state was saved, and then read that state."""

    def run(model: Any, optimizer: Any) -> Iterator[tuple[str, Any]]:
        import torch

        state = _state(model, optimizer, GATHERED)
        read = {
            number: {key: each.data.detach().clone() for key, each in entry.items()} for number, entry in state.items()
        }
        PACK._step(optimizer, 3)
        for each in optimizer.optimizer.state.values():
            each.pop("step")  # none is in such a checkpoint: Apex and Transformer Engine keep it with the group
        with torch.no_grad():
            optimizer.load_parameter_state_from_fully_reshardable(read)
        for group in optimizer.optimizer.param_groups:
            for number, each in enumerate(group["params"]):
                yield from _numbers({"master": each, **optimizer.optimizer.state[each]}, f"{number}")

    return _on_ranks(1, shapes, run)


def _state(model: Any, optimizer: Any, metadata: Mapping[str, object]) -> Any:
    return optimizer.sharded_state_dict(model.sharded_state_dict(), metadata=metadata)["param_state"]


def _numbers(state: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield numbers of all tensors in a sharded state, by where they are; of padding there are none, and it may hold anything."""
    if hasattr(state, "items"):
        if getattr(state.get("padding"), "obj", False):
            return
        for key, each in state.items():
            yield from _numbers(each, f"{where} {key}")
    elif isinstance(state, (list, tuple)):
        for number, each in enumerate(state):
            yield from _numbers(each, f"{where} {number}")
    elif hasattr(state, "key") and hasattr(state, "data"):
        yield from _numbers(state.data, f"{where} {state.key}")
    elif hasattr(state, "numel") and state.numel():
        flat = state.detach().flatten()
        yield where, [flat[:MOST].tolist(), flat[-MOST:].tolist()]


def _on_ranks(ranks: int, shapes: Any, run: Callable[[Any, Any], Iterator[tuple[str, Any]]]) -> Mapping[str, object]:
    optimizer_class = importlib.import_module(PACK.OPTIMIZER).DistributedOptimizer
    if not hasattr(optimizer_class, "sharded_param_state_fully_reshardable"):
        raise TargetAbsent("DistributedOptimizer has no fully reshardable format")
    _let_groups_go()

    def on_rank(_: int) -> Mapping[str, Any]:
        from megatron.core import parallel_state

        with PACK._tensors_that_say_cuda():
            PACK.SHAPES = shapes  # in this process, which is a rank of its own
            parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
            model, _, optimizer = PACK._build("cpu")
            for seed in (1, 2):
                PACK._step(optimizer, seed)
            return dict(run(model, optimizer))

    return on_ranks(ranks, on_rank)


def _let_groups_go() -> None:
    """Let groups of the case before go, in the process that has their threads: a rank that is forked would wait for these."""
    import torch
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    names = vars(parallel_state)
    names.update({name: None for name, each in names.items() if isinstance(each, torch.distributed.ProcessGroup)})
    gc.collect()


def _neighbour(name: str, run: Callable[..., Mapping[str, object]], *arguments: Any) -> Neighbour:
    return Neighbour(name=name, overlay="fully-reshardable-padding", run=functools.partial(run, *arguments))


NEIGHBOURS = (
    _neighbour("full-buckets", _saved, 1, FULL),
    _neighbour("full-buckets-of-two-ranks", _saved, 2, FULL),
    _neighbour("one-bucket", _saved, 1, ONE),
    _neighbour("other-formats", _otherwise, PADDED),
    _neighbour("read-back", _read_back, FULL),
)
