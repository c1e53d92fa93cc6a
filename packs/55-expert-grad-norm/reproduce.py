"""Megatron's optimizers under tensor and expert parallelism: are all experts in the norm that gradients are clipped by?

Two ranks are forked and meet with gloo: tensor parallelism of two, and one whole expert on each (`expert_tensor_parallel_size=1`), with a norm that
both have; or four, of which two and two have the same expert. A real `SequentialMLP` runs forwards and backwards, and real optimizers, one of the experts and one of all else, take the norm and count zeros,
in fp32 and with fp32 copies of bf16 parameters. What both should be is added up from the gradients: experts of all ranks, and replicas once. Megatron makes
a few scalars on a GPU; they are made on the CPU here.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent, cpu_for_gpu, on_ranks

OVERLAY = "expert-grad-norm"
MODULE = "megatron.core.tensor_parallel.layers"
OPTIMIZERS = "megatron.core.optimizer.optimizer"
ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride")
HIDDEN, TOKENS, RANKS = 8, 6, 2
TOLERANCE = 1e-5
"""Relative: ranks add in another order, fp32 rounding, 1e-7."""


def _run(ranks: int = RANKS, *, marked: bool) -> Behaviour:
    said, apart = [], []
    for dtype in ("float32", "bfloat16"):
        found = stepped(ranks, expert_tensor_parallel=1, expert_parallel=2, bias=marked, marked=marked, dtype=dtype)
        norms, rights = (_values(found, each) for each in ("norm", "right norm"))
        zeros, right_zeros = (_values(found, each) for each in ("zeros", "right zeros"))
        apart += [norm / right - 1 for norm, right in zip(norms, rights, strict=True)]
        apart += [counted - right for counted, right in zip(zeros, right_zeros, strict=True)]
        taken = " and ".join(dict.fromkeys(f"{norm:.5f}" for norm in norms))
        counted = " and ".join(dict.fromkeys(f"{each:.0f}" for each in zeros))
        said.append(f"{dtype}: the norm is {taken} of {rights[0]:.5f}, and {counted} of {right_zeros[0]:.0f} zeros are counted")
    return Behaviour(broken=any(abs(each) > TOLERANCE for each in apart), seen=f"two experts on {ranks} ranks; {'; '.join(said)}")


def _values(found: Mapping[str, list[float]], what: str) -> list[float]:
    return [number for name, numbers in found.items() if name.endswith(f", {what}") for number in numbers]


def stepped(ranks: int, *, expert_tensor_parallel: int, expert_parallel: int | None = None, bias: bool = False, marked: bool = True, experts: bool = True, dtype: str = "float32", clip: float = 0.05) -> Mapping[str, list[float]]:
    """Return of each rank the norm, what is counted as zero, what both should be, and all parameters after a clipped step.

    Args:
        ranks: all of them, under tensor parallelism.
        expert_tensor_parallel: how many share an expert.
        expert_parallel: how many such groups have experts of their own; by default all.
        bias: whether linear layers have one, which Megatron allows where no ranks share an expert.
        marked: whether weights of experts have attributes of tensor parallelism; those of `GroupedLinear` of Transformer Engine 2.20 have none.
        experts: whether the model has experts; it always has a norm.
        dtype: of the parameters.
        clip: the norm that gradients are clipped to.

    Raises:
        TargetAbsent: this release has no group of ranks that share an expert.
    """
    prepare()
    return on_ranks(ranks, functools.partial(_stepped, expert_tensor_parallel, expert_parallel or ranks // expert_tensor_parallel, bias, marked, experts, dtype, clip))


def prepare() -> None:
    """Import what ranks need before they are forked.

    Raises:
        TargetAbsent: this release has no group of ranks that share an expert.
    """
    warnings.simplefilter("ignore")
    try:
        importlib.import_module(MODULE)
        states: Any = importlib.import_module("megatron.core.parallel_state")
    except ModuleNotFoundError as error:
        if not MODULE.startswith(str(error.name)):
            raise
        raise TargetAbsent(f"there is no {MODULE}") from error
    if not hasattr(states, "get_expert_tensor_parallel_world_size"):
        raise TargetAbsent("there is no group of ranks that share an expert")
    for name in ("megatron.core.transformer.moe.experts", OPTIMIZERS):
        importlib.import_module(name)


def _stepped(expert_tensor_parallel: int, expert_parallel: int, bias: bool, marked: bool, experts: bool, dtype: str, clip: float, rank: int) -> Mapping[str, Any]:
    import torch
    from megatron.core import parallel_state

    ranks = torch.distributed.get_world_size()
    with cpu_for_gpu():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=ranks,
            expert_model_parallel_size=expert_parallel,
            expert_tensor_parallel_size=expert_tensor_parallel,
        )
        parts = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(HIDDEN, dtype=getattr(torch, dtype))})
        if experts:
            parts["experts"] = _experts(ranks, expert_tensor_parallel, expert_parallel, bias, dtype)
            for name, each in parts["experts"].named_parameters():
                for attribute in ATTRIBUTES if name.endswith("weight") and not marked else ():
                    delattr(each, attribute)
        _fill(parts, parallel_state.get_expert_model_parallel_rank())
        _learn(parts)
        optimizer = _optimizer(parts, clip, dtype)
        right = _right(parts, rank)
        optimizer.prepare_grads()
        found = {"norm": optimizer.get_grad_norm(), "zeros": optimizer.count_zeros()}
        optimizer.step()
    return {**found, **right, **{name: each.detach().float() for name, each in parts.named_parameters()}}


def _right(parts: Any, rank: int) -> dict[str, Any]:
    """Return the norm and the zeros of all gradients, each of which counts once: the norm of a layer is on every rank."""
    import torch
    from megatron.core import parallel_state

    total = torch.zeros(2, dtype=torch.float64)
    is_first_replica = parallel_state.get_expert_data_parallel_rank() == 0
    for name, each in parts.named_parameters():
        is_cut = name.endswith(("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight"))
        is_first = is_cut or parallel_state.get_expert_tensor_parallel_rank() == 0
        if is_first_replica and is_first if "experts" in name else rank == 0:
            total += torch.tensor([each.grad.double().square().sum(), (each.grad == 0).sum()])
    torch.distributed.all_reduce(total)
    return {"right norm": total[0].sqrt(), "right zeros": total[1]}


def _experts(ranks: int, expert_tensor_parallel: int, expert_parallel: int, bias: bool, dtype: str) -> Any:
    """Return the experts of this rank, one, or its share of one."""
    import torch
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=ranks,
        num_moe_experts=expert_parallel,
        tensor_model_parallel_size=ranks,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=expert_tensor_parallel,
        sequence_parallel=ranks > 1,
        add_bias_linear=bias,
        use_cpu_initialization=True,
        params_dtype=getattr(torch, dtype),
        bf16=dtype == "bfloat16",
    )
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    known = inspect.signature(SequentialMLP).parameters
    return SequentialMLP(1, config, parts, **({"pg_collection": _groups()} if "pg_collection" in known else {}))


def _groups() -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


def _fill(parts: Any, expert: int) -> None:
    """Give each parameter numbers that depend on the expert, where it is one's."""
    import torch

    with torch.no_grad():
        for name, each in parts.named_parameters():
            generator = torch.Generator().manual_seed(expert if "experts" in name else RANKS)
            each.copy_(torch.randn(*each.shape, generator=generator))


def _learn(parts: Any) -> None:
    """Run the parts forwards and backwards; half of the channels are zero, so that gradients are, of weights and of biases."""
    import torch

    generator = torch.Generator().manual_seed(3)
    dtype = parts["norm"].weight.dtype
    tokens, weights = ((torch.randn(TOKENS, HIDDEN, generator=generator) * (torch.arange(HIDDEN) % 2)).to(dtype) for _ in range(2))
    loss = (parts["norm"](tokens) * weights).sum()
    if "experts" in parts:
        weighted = (torch.ones(TOKENS),) if len(inspect.signature(parts["experts"].forward).parameters) > 2 else ()
        output, bias = parts["experts"](tokens, torch.tensor([TOKENS]), *weighted)
        loss = loss + ((output if bias is None else output + bias) * weights).sum()
    loss.backward()


def _optimizer(parts: Any, clip: float, dtype: str) -> Any:
    """Return an optimizer as `get_megatron_optimizer` makes it: one of parameters that data parallel ranks of experts reduce, and one of all others."""
    import torch
    from megatron.core import optimizer as optimizers
    from megatron.core import parallel_state
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    config = OptimizerConfig(
        optimizer="sgd",
        lr=1.0,
        weight_decay=0.0,
        sgd_momentum=0.0,
        clip_grad=clip,
        bf16=dtype == "bfloat16",
        params_dtype=getattr(torch, dtype),
        log_num_zeros_in_grad=True,
    )
    make: Any = optimizers._get_megatron_optimizer_based_on_param_groups  # noqa: SLF001 - its caller wants a model on a GPU
    known = inspect.signature(make).parameters
    made = []
    for of_experts, group in (
        (False, parallel_state.get_model_parallel_group()),
        (True, parallel_state.get_expert_tensor_model_pipeline_parallel_group()),
    ):
        chosen = [each for each in parts.parameters() if getattr(each, "allreduce", True) is not of_experts]
        given = {"config": config, "model_chunks": [parts], "param_groups": [{"params": chosen}], "model_parallel_group": group}
        given |= {"pg_collection": _groups()} if "pg_collection" in known else {}
        made += [make(**given)] if chosen else []
    return optimizers.ChainedOptimizer(made)


_case = functools.partial(Case, overlay=OVERLAY, device="cpu", versions=("torch",))
CASES = (
    _case(name="biases-cpu", run=functools.partial(_run, marked=True)),
    _case(name="unmarked-weights-cpu", run=functools.partial(_run, marked=False)),
    _case(name="replicas-cpu", run=functools.partial(_run, 2 * RANKS, marked=False)),
)
