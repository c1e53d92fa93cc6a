"""Megatron's experts with a tensor parallel size of their own and without expert parallelism: are their gradients reduced over ranks that hold the same?

Two ranks are forked and meet with gloo. Real experts of a transformer layer run forwards and backwards, with `DistributedDataParallel` and without. Without it the
gradients of each rank are added up over the data parallel ranks of experts, and divided by the number of data parallel ranks, as Megatron does for experts.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent, cpu_for_gpu, on_ranks

OVERLAY = "expert-gradient-groups"
MODULE = "megatron.core.transformer.moe.moe_layer"
HIDDEN, TOKENS, EXPERTS, RANKS = 8, 8, 4, 2
TOLERANCE = 1e-5
"""Relative: fp32 rounding, 1e-7."""
SIZES: Mapping[str, Mapping[str, Any]] = {
    "experts of 2 ranks, layers of 1": {"tensor_parallel": 1, "expert_tensor_parallel": 2},
    "experts of 1 rank, layers of 2": {"tensor_parallel": 2, "expert_tensor_parallel": 1},
}


def _run() -> Behaviour:
    said, worst = [], 0.0
    for name, sizes in SIZES.items():
        off = max(each[0] for key, each in learnt(**sizes).items() if key.endswith(", off"))
        worst = max(worst, off)
        said.append(f"{name}: {off:.1e} off")
    return Behaviour(broken=worst > TOLERANCE, seen=f"gradients of experts on {RANKS} ranks, tensor parallel {'; '.join(said)}")


def learnt(
    *,
    tensor_parallel: int,
    expert_tensor_parallel: int,
    expert_parallel: int = 1,
    ranks: int = RANKS,
    distributed_optimizer: bool = False,
    **settings: Any,
) -> dict[str, list[float]]:
    """Return of each rank how far gradients of experts are off, and gradients of all parameters.

    Args:
        tensor_parallel: ranks that share a layer.
        expert_tensor_parallel: ranks that share an expert.
        expert_parallel: groups of them that hold experts of their own.
        ranks: all of them.
        distributed_optimizer: whether gradients are scattered; then they are compared where a rank has them.
        settings: of the configuration.
    """
    prepare()
    asked = (tensor_parallel, expert_tensor_parallel, expert_parallel, distributed_optimizer, settings)
    return on_ranks(ranks, functools.partial(_learnt, *asked))


def prepare() -> None:
    """Import what ranks need before they are forked.

    Raises:
        TargetAbsent: experts have no tensor parallel size of their own.
        Blocked: experts of this release need Transformer Engine for that.
    """
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")  # 0.15 asks for it as it is imported
    import torch

    warnings.simplefilter("ignore")
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda *_: SimpleNamespace(wait_stream=lambda _: None)
    try:
        importlib.import_module(MODULE)
        states: Any = importlib.import_module("megatron.core.parallel_state")
    except ModuleNotFoundError as error:
        if not MODULE.startswith(str(error.name)):
            raise
        raise TargetAbsent(f"there is no {MODULE}") from error
    if not hasattr(states, "get_expert_tensor_parallel_world_size"):
        raise TargetAbsent("experts have no tensor parallel size of their own")
    version = importlib.import_module("megatron.core").__version__
    if tuple(map(int, version.split(".")[:2])) < (0, 13):
        raise Blocked(f"experts of linear layers of Megatron {version} do not run with such sizes")
    importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    importlib.import_module("megatron.core.distributed")
    utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    utils.te_general_gemm = getattr(utils, "te_general_gemm", None)  # 0.16 asks for it without Transformer Engine, too


def _learnt(
    tensor_parallel: int,
    expert_tensor_parallel: int,
    expert_parallel: int,
    distributed_optimizer: bool,
    settings: Mapping[str, Any],
    rank: int,
) -> Mapping[str, Any]:
    import torch
    from megatron.core import distributed, parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=expert_tensor_parallel,
    )
    with cpu_for_gpu():
        config = _config(tensor_parallel, expert_tensor_parallel, expert_parallel, settings)
        layer = _experts(config)
        experts = [*layer.experts.parameters()]
        _train(layer, rank)
        right = [each.grad.clone() for each in experts]
        group = parallel_state.get_expert_data_parallel_group()
        for each in right:
            torch.distributed.all_reduce(each, group=group)
            each /= parallel_state.get_data_parallel_world_size()
        layer.zero_grad(set_to_none=True)
        asked = distributed.DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer)
        model = distributed.DistributedDataParallel(config, asked, layer)
        model.zero_grad_buffer()
        _train(model, rank)
        model.finish_grad_sync()
    off = max(float((each.main_grad - wanted).norm() / wanted.norm()) for each, wanted in zip(experts, right, strict=True))
    return {"off": off, **{name: each.main_grad for name, each in layer.named_parameters()}}


def _config(tensor_parallel: int, expert_tensor_parallel: int, expert_parallel: int, settings: Mapping[str, Any]) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    asked = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 2 * HIDDEN,
        "moe_ffn_hidden_size": 2 * HIDDEN,
        "num_attention_heads": RANKS,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "allgather",
        "tensor_model_parallel_size": tensor_parallel,
        "sequence_parallel": tensor_parallel > 1,
        "expert_model_parallel_size": expert_parallel,
        "expert_tensor_parallel_size": expert_tensor_parallel,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
    }
    return TransformerConfig(**{**asked, **settings})


def _experts(config: Any) -> Any:
    """Return the layer of experts of a transformer layer, which gives it its number, with weights that replicas share."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False).submodules.mlp
    layer: Any = build_module(spec, config=config, layer_number=1) if hasattr(spec, "module") else spec(config=config, layer_number=1)
    layer.set_layer_number(1)
    for number, each in enumerate(layer.parameters()):
        torch.nn.init.normal_(each, generator=torch.Generator().manual_seed(number))
    return layer


def _train(model: Any, rank: int) -> None:
    """Run tokens of a rank forwards, and one gradient for each backwards."""
    import torch

    made = torch.Generator().manual_seed(100 + rank)
    tokens, gradient = (torch.randn(TOKENS, 1, HIDDEN, generator=made) for _ in range(2))
    found = model(tokens)
    (found[0] if isinstance(found, tuple) else found).backward(gradient)


CASES = (Case(name="sizes-cpu", overlay=OVERLAY, device="cpu", versions=("torch",), run=_run),)
