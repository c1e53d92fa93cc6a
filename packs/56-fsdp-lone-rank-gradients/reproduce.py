"""Megatron-FSDP over several microbatches: what do weights learn whose gradients no other rank has a part of?

That is each expert where expert parallelism takes all data parallel ranks, and each weight where there is one rank. Ranks are forked and meet with gloo, and
train a real `MegatronFSDP` of a linear layer and of an expert for one step of three microbatches. Compared is the change of each weight with that of the same layers as they
are: with the sum, or the mean over data parallel ranks, of all microbatches' gradients, which ranks send in fp32 or in bf16.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megacpp_overlays.repro import (
    Behaviour,
    Blocked,
    Case,
    TargetAbsent,
    compared,
    fsdp_on_cpu,
    fully_shard_module,
    on_ranks,
    step_beside,
)

OVERLAY = "fsdp-lone-rank-gradients"
HIDDEN, MICROBATCHES = 4, 3
SHARDED = "optim_grads_params"
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Relative, of the dtype in which gradients are sent."""
WAYS: Mapping[str, Mapping[str, Any]] = {
    "means": {"mean": True},
    "sums": {"mean": False},
    "means sent in bfloat16": {"mean": True, "sent": "bfloat16"},
}


def _run(ranks: int, weights: tuple[str, ...], outer: int = 1) -> Behaviour:
    said, broken = [], False
    for way, given in WAYS.items():
        if "sent" in given and _precision() is None:
            continue
        found = learned(ranks, outer=outer, **given)
        for weight in weights:
            times, apart = compared(found, weight)
            broken |= max(abs(times - 1), apart) > TOLERANCE[given.get("sent", "float32")]
            said.append(f"{weight}, {way}: {times:.4f} times as much, {apart:.1e} off")
    return Behaviour(broken=broken, seen=f"{MICROBATCHES} microbatches, data parallel size {ranks // outer}{f' times {outer}' * (outer > 1)}; {'; '.join(said)}")


def _precision() -> Any:
    """Return the class that says in which dtype gradients are sent; 0.17.0 has the first."""
    return getattr(importlib.import_module(f"{fully_shard_module().__package__}.mixed_precision"), "MixedPrecisionPolicy", None)


def learned(
    ranks: int = 2,
    *,
    outer: int = 1,
    expert_parallel: int | None = None,
    sharded: str = SHARDED,
    mean: bool = True,
    sent: str | None = None,
) -> Mapping[str, list[float]]:
    """Return of each rank how much the linear layer and the expert change, and how much they should.

    Args:
        ranks: all of them, data parallel.
        outer: how many groups of ranks have all weights (hybrid sharding).
        expert_parallel: how many ranks of such a group have an expert of their own; all by default.
        sharded: what is sharded, in Megatron-FSDP's words.
        mean: whether gradients are divided by the number of ranks.
        sent: dtype in which ranks send gradients; that of the weights, fp32, by default.

    Raises:
        TargetAbsent: this release has no Megatron-FSDP, none for experts, or none that sends gradients in another dtype.
        Blocked: its hybrid sharding cannot be asked.
    """
    known = inspect.signature(fully_shard_module().fully_shard).parameters
    if "expt_device_mesh" not in known:
        raise TargetAbsent("experts have no ranks of their own")
    if outer > 1 and "hybrid_fsdp_expt_group" not in known:
        raise Blocked("fully_shard of this release takes no hybrid group of experts")
    if sent is not None and _precision() is None:
        raise TargetAbsent("gradients are sent in the dtype in which they are kept")
    return on_ranks(ranks, functools.partial(_learned, _Ranks(outer, ranks // outer, expert_parallel or ranks // outer), sharded, mean, sent))


class _Ranks(NamedTuple):
    """Sizes of data parallel groups: how many outer groups there are, ranks of each, and how many of these have an expert of their own."""

    outer: int
    inner: int
    expert_parallel: int

    def sharing(self, rank: int) -> dict[str, list[int]]:
        """Return which ranks of its group hold parts of the weights of a rank, by kind."""
        first, shared = rank // self.inner * self.inner, self.inner // self.expert_parallel
        own = rank // shared * shared
        return {"layer": [*range(first, first + self.inner)], "expert": [*range(own, own + shared)]}

    def adding(self, rank: int) -> dict[str, list[int]]:
        """Return the ranks of all groups whose gradients add up, by kind."""
        return {
            kind: [other % self.inner + group * self.inner for group in range(self.outer) for other in ranks]
            for kind, ranks in self.sharing(rank).items()
        }


def _learned(arranged: _Ranks, sharded: str, mean: bool, sent: str | None, rank: int) -> Mapping[str, Any]:
    import torch

    fsdp_on_cpu()
    ranks = torch.distributed.get_world_size()
    plain, copied = _model(), _model()
    copied.load_state_dict(plain.state_dict())
    model, optimizer = _sharded(copied, arranged, sharded, mean, sent)
    holders = arranged.sharing(rank)
    before = _whole(model, holders)
    step_beside(model, plain, optimizer, rank=rank, microbatches=MICROBATCHES)
    after, right = _whole(model, holders), _gradients(plain, arranged.adding(rank))
    found = {name: before[name] - after[name] for name in holders}
    return {**found, **{f"right {name}": right[name] / (ranks if mean else 1) for name in holders}}


def _model() -> Any:
    """Return a layer and an expert, which Megatron-FSDP knows by its name."""
    import torch

    torch.manual_seed(56)
    layer, expert = (torch.nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
    expert.weight.allreduce = False
    experts = OrderedDict(experts=torch.nn.Sequential(expert))
    return torch.nn.Sequential(OrderedDict(layer=layer, moe=torch.nn.Sequential(experts)))


def _sharded(model: Any, arranged: _Ranks, sharded: str, mean: bool, sent: str | None) -> tuple[Any, Any]:
    """Return the model with its gradients sharded over data parallel ranks, and an optimizer that subtracts them."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    outer, inner, expert_parallel = arranged
    mesh = init_device_mesh("cpu", (outer, inner, 1), mesh_dim_names=("outer", "dp", "tp"))
    shape = (outer, expert_parallel, inner // expert_parallel, 1)
    experts = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "ep", "dp", "tp"))
    given: dict[str, Any] = {"device_mesh": mesh["dp", "tp"], "expt_device_mesh": experts["dp", "tp"]}
    if outer > 1:
        given = {"device_mesh": mesh, "expt_device_mesh": experts["outer", "dp", "tp"], "dp_outer_dim": "outer"}
        for each, name in ((mesh, "hybrid_fsdp_group"), (experts, "hybrid_fsdp_expt_group")):
            given[name] = each["outer", "dp"]._flatten(name).get_group()  # noqa: SLF001 - as Megatron-FSDP's documentation has it
    precision = {} if sent is None else {"mixed_precision_policy": _precision()(grad_comm_dtype=getattr(torch, sent))}
    model, optimizer = fully_shard_module().fully_shard(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        **given,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[torch.nn.Linear],
        zero_dp_strategy=sharded,
        device=torch.device("cpu"),
        calculate_per_token_loss=not mean,
        sync_model_each_microbatch=False,
        **precision,
    )
    model.ddp_config.gradient_reduce_div_fusion = False  # as Megatron's option: gloo cannot multiply while it sums
    return model, optimizer


def _whole(model: Any, holders: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return each weight as its optimizer has it, in one row, from the ranks that hold parts of it."""
    import torch

    model._replace_param_with_distributed_if_needed()  # noqa: SLF001 - optimizers are given what it puts there
    found = {}
    for name, each in model.named_parameters():
        is_part = hasattr(each, "to_local")
        parts = _of_all_ranks((each.to_local() if is_part else each).detach().flatten().clone())
        kind = _kind(name)
        found[kind] = torch.cat([parts[rank] for rank in holders[kind]]) if is_part else parts[holders[kind][0]]
    return found


def _gradients(model: Any, holders: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return the gradient of each weight in one row: the sum over ranks that have it."""
    found = {}
    for name, each in model.named_parameters():
        parts = _of_all_ranks(each.grad.flatten())
        found[_kind(name)] = sum(parts[rank] for rank in holders[_kind(name)])
    return found


def _kind(name: str) -> str:
    return "expert" if ".experts." in name else "layer"


def _of_all_ranks(tensor: Any) -> list[Any]:
    import torch

    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, tensor)
    return parts


_case = functools.partial(Case, overlay=OVERLAY, device="cpu", versions=("torch",))
CASES = (
    _case(name="experts-cpu", run=functools.partial(_run, 2, ("expert", "layer"))),
    _case(name="one-rank-cpu", run=functools.partial(_run, 1, ("layer",))),
    _case(name="hybrid-cpu", run=functools.partial(_run, 4, ("expert", "layer"), outer=2)),
)
