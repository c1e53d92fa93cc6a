"""Weights that are loaded without the optimizer's state, and a precision-aware optimizer that has taken a step: does its next step start from them?

One rank has a real linear layer under Megatron's DistributedDataParallel, a real `DistributedOptimizer` and Transformer Engine's `FusedAdam`, which keeps the main weights. Weights are loaded into the layer and `reload_model_params` is called, as
`load_checkpoint` does. On a GPU a step follows; on a CPU, for which FusedAdam has no step, the main weights that it would start from are read.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent, cpu_for_gpu, on_ranks

OVERLAY = "precision-aware-reload"
SIZE, RATE = 64, 0.125
STATES = "_get_main_param_and_optimizer_states"
OLD, NEW = 7.0, 1.0
"""Every weight before and after weights are loaded."""


def _run(device: str, **asked: Any) -> Behaviour:
    found = reloaded(device, **asked)["weights"]
    right = NEW - RATE if device == "cuda" else NEW
    what = "weights after a step" if device == "cuda" else "main weights"
    return Behaviour(
        broken=any(abs(each - right) > 1e-2 for each in found),
        seen=f"weights of {OLD:g} became {NEW:g}: {what} are {min(found):g} to {max(found):g}, {right:g} is right",
    )


def reloaded(device: str = "cpu", **asked: Any) -> Mapping[str, list[float]]:
    """Return weights and Adam's moments after weights were loaded.

    Args:
        device: `cuda`, with steps, or `cpu`.
        asked: see `_reloaded`.

    Raises:
        Blocked: Transformer Engine is not installed.
        TargetAbsent: this release has no precision-aware optimizer.
    """
    importlib.import_module("torch")  # loads NCCL, which Transformer Engine wants
    try:
        importlib.import_module("transformer_engine.pytorch.optimizers")
    except (ImportError, OSError) as error:
        raise Blocked(f"FusedAdam is Transformer Engine's: {error}") from error
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    importlib.import_module("megatron.core.distributed")
    importlib.import_module("megatron.core.transformer.transformer_config")
    if "use_precision_aware_optimizer" not in optimizer.OptimizerConfig.__dataclass_fields__:
        raise TargetAbsent("this release has no precision-aware optimizer")
    if device == "cpu":
        found = on_ranks(1, functools.partial(_reloaded, device, asked))
        return {name.removeprefix("rank 0, "): each for name, each in found.items()}
    import torch

    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        return {name: each.tolist() for name, each in _reloaded(device, asked, 0).items()}
    finally:
        importlib.import_module("megatron.core.parallel_state").destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _reloaded(device: str, asked: Mapping[str, Any], _rank: int) -> Mapping[str, Any]:
    """Load weights into a layer, and on a GPU take a step.

    Args:
        device: of the layer.
        asked: `begun`, whether the optimizer has state (yes); `dtype`, the name of that of weights; `half`, whether main weights are float16; and any setting of `OptimizerConfig`.
    """
    import torch
    from megatron.core import distributed, parallel_state
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = getattr(torch, asked.get("dtype", "bfloat16"))
    half = {"main_params_dtype": torch.float16} if asked.get("half") else {}
    settings = {
        "use_precision_aware_optimizer": True, "store_param_remainders": False, "use_distributed_optimizer": True, "bf16": dtype == torch.bfloat16,
        "lr": RATE, "weight_decay": 0.0, "clip_grad": 0.0, **{name: each for name, each in asked.items() if name not in {"begun", "dtype", "half"}}, **half,
    }  # fmt: skip
    parallel_state.initialize_model_parallel()
    if device == "cpu":
        torch.cuda.current_device = lambda: "cpu"
    with cpu_for_gpu() if device == "cpu" else nullcontext():
        config = TransformerConfig(num_layers=1, hidden_size=SIZE, num_attention_heads=1)
        layer = torch.nn.Linear(SIZE, SIZE, bias=False, dtype=dtype, device=device)
        torch.nn.init.constant_(layer.weight, OLD)
        wrapper = distributed.DistributedDataParallel(config, distributed.DistributedDataParallelConfig(use_distributed_optimizer=True), layer)
        whole = get_megatron_optimizer(OptimizerConfig(**settings), [wrapper])
        (part,) = whole.chained_optimizers
        if asked.get("begun", True):
            adam = part.optimizer
            for each in (each for group in adam.param_groups for each in group["params"]):
                adam.initialize_state(each, adam.store_param_remainders and each.dtype == torch.bfloat16)
        with torch.no_grad():
            layer.weight.fill_(NEW)
        whole.reload_model_params()
        weights = layer.weight
        if device == "cuda":
            layer.weight.main_grad.fill_(1.0)
            whole.step()
        elif asked.get("begun", True):
            weights = getattr(part, STATES)(layer.weight)["param"]
        moments = [each.float() for state in part.optimizer.state.values() for name, each in state.items() if name.startswith("exp_")]
    return {"weights": weights.detach().float().cpu().flatten(), "moments": torch.cat([each.cpu().flatten() for each in moments] or [torch.zeros(1)])}


_case = functools.partial(Case, overlay=OVERLAY, versions=("transformer-engine", "torch"))
CASES = (
    _case(name="main-weights-cpu", device="cpu", run=functools.partial(_run, "cpu")),
    _case(name="half-main-weights-cpu", device="cpu", run=functools.partial(_run, "cpu", half=True)),
    _case(name="step-cuda", device="cuda", run=functools.partial(_run, "cuda")),
)
