"""Megatron's layer-wise optimizer under tensor and expert parallelism: are the biases of all experts in the norm that gradients are clipped by?

Two ranks are forked and meet with gloo: tensor parallelism of two, and one whole expert on each (`expert_tensor_parallel_size=1`), with a norm that
both have. A real `SequentialMLP` runs forwards and backwards, and a real `LayerWiseDistributedOptimizer` takes the norm and counts zeros. What both
should be is added up from the gradients: experts of all ranks, and replicas once. Megatron makes a few scalars on a GPU; they are made on the CPU here.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent, cpu_for_gpu, on_ranks

OVERLAY = "layerwise-norm-groups"
MODULE = "megatron.core.optimizer.layer_wise_optimizer"
CLASS = "LayerWiseDistributedOptimizer"
OPTIMIZERS = "megatron.core.optimizer.optimizer"
HIDDEN, TOKENS, RANKS = 8, 6, 2
TOLERANCE = 1e-5
"""Relative: ranks add in another order, fp32 rounding, 1e-7."""


def _run() -> Behaviour:
    found = stepped(RANKS, expert_tensor_parallel=1)
    norms, rights = (_values(found, each) for each in ("norm", "right norm"))
    zeros, right_zeros = (_values(found, each) for each in ("zeros", "right zeros"))
    apart = max(abs(norm / right - 1) for norm, right in zip(norms, rights, strict=True))
    seen = f"one expert on each of {RANKS} ranks: the norm is {norms[0]:.5f} of {rights[0]:.5f}, and {zeros[0]:.0f} of {right_zeros[0]:.0f} zeros are counted"
    return Behaviour(broken=apart > TOLERANCE or zeros != right_zeros, seen=seen)


def _values(found: Mapping[str, list[float]], what: str) -> list[float]:
    return [number for name, numbers in found.items() if name.endswith(f", {what}") for number in numbers]


def stepped(ranks: int, *, expert_tensor_parallel: int, bias: bool = True, experts: bool = True, clip: float = 0.05) -> Mapping[str, list[float]]:
    """Return of each rank the norm, what is counted as zero, what both should be, and all parameters after a clipped step.

    Args:
        ranks: all of them, under tensor parallelism.
        expert_tensor_parallel: how many share an expert; each group has experts of its own.
        bias: whether linear layers have one.
        experts: whether the optimizer has them, beside the norm.
        clip: the norm that gradients are clipped to.

    Raises:
        TargetAbsent: there is no such optimizer.
    """
    prepare()
    return on_ranks(ranks, functools.partial(_stepped, expert_tensor_parallel, bias, experts, clip))


def prepare() -> None:
    """Import what ranks need before they are forked.

    Raises:
        TargetAbsent: there is no such optimizer, or nothing tells replicas of experts from those of other layers.
    """
    warnings.simplefilter("ignore")
    try:
        module: Any = importlib.import_module(MODULE)
        optimizers: Any = importlib.import_module(OPTIMIZERS)
    except ModuleNotFoundError as error:
        if not MODULE.startswith(str(error.name)):
            raise
        raise TargetAbsent(f"there is no {MODULE}") from error
    if not hasattr(module, CLASS):
        raise TargetAbsent(f"there is no {MODULE}.{CLASS}")
    if "expert_tp_group" not in inspect.getsource(optimizers):
        raise TargetAbsent("no optimizer tells replicas of experts by a group of their own")
    for name in ("megatron.core.transformer.moe.experts", "megatron.core.optimizer.optimizer", "megatron.core.process_groups_config"):
        importlib.import_module(name)


def _stepped(expert_tensor_parallel: int, bias: bool, experts: bool, clip: float, rank: int) -> Mapping[str, Any]:
    import torch
    from megatron.core import parallel_state

    ranks = torch.distributed.get_world_size()
    with cpu_for_gpu():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=ranks,
            expert_model_parallel_size=ranks // expert_tensor_parallel,
            expert_tensor_parallel_size=expert_tensor_parallel,
        )
        parts = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(HIDDEN)})
        if experts:
            parts["experts"] = _experts(ranks, expert_tensor_parallel, bias)
        _fill(parts, rank // expert_tensor_parallel)
        _learn(parts)
        optimizer = _optimizer(parts, clip)
        found = {"norm": optimizer.get_grad_norm(), "zeros": optimizer.count_zeros()}
        right = _right(parts, rank, expert_tensor_parallel)
        optimizer.step()
    return {**found, **right, **{name: each.detach() for name, each in parts.named_parameters()}}


def _right(parts: Any, rank: int, expert_tensor_parallel: int) -> dict[str, Any]:
    """Return the norm and the zeros of all gradients, each of which counts once: the norm of a layer is on every rank."""
    import torch

    total = torch.zeros(2, dtype=torch.float64)
    for name, each in parts.named_parameters():
        is_cut = name.endswith(("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight"))
        place = rank % expert_tensor_parallel if "experts" in name else rank
        if place == 0 or is_cut:
            total += torch.tensor([each.grad.double().square().sum(), (each.grad == 0).sum()])
    torch.distributed.all_reduce(total)
    return {"right norm": total[0].sqrt(), "right zeros": total[1]}


def _experts(ranks: int, expert_tensor_parallel: int, bias: bool) -> Any:
    """Return the experts of this rank, one, or its share of one."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=ranks,
        num_moe_experts=ranks // expert_tensor_parallel,
        tensor_model_parallel_size=ranks,
        expert_model_parallel_size=ranks // expert_tensor_parallel,
        expert_tensor_parallel_size=expert_tensor_parallel,
        sequence_parallel=ranks > 1,
        add_bias_linear=bias,
        use_cpu_initialization=True,
    )
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return SequentialMLP(1, config, parts, ProcessGroupCollection.use_mpu_process_groups())


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
    tokens, weights = (torch.randn(TOKENS, HIDDEN, generator=generator) * (torch.arange(HIDDEN) % 2) for _ in range(2))
    loss = (parts["norm"](tokens) * weights).sum()
    if "experts" in parts:
        output, bias = parts["experts"](tokens, torch.tensor([TOKENS]), torch.ones(TOKENS))
        loss = loss + ((output if bias is None else output + bias) * weights).sum()
    loss.backward()


def _optimizer(parts: Any, clip: float) -> Any:
    import torch
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from megatron.core.process_groups_config import ProcessGroupCollection

    config = OptimizerConfig(optimizer="sgd", lr=1.0, clip_grad=clip)
    inner = FP32Optimizer(torch.optim.SGD(parts.parameters(), lr=1.0), config, lambda *_: None)
    made = getattr(importlib.import_module(MODULE), CLASS)
    return made([inner], config, ProcessGroupCollection.use_mpu_process_groups())


CASES = (
    Case(
        name="experts-cpu",
        overlay=OVERLAY,
        device="cpu",
        versions=("torch",),
        run=_run,
    ),
)
