"""Megatron's balancing loss over the global batch: is the gradient of a router the same on two data parallel ranks as on one?

Real `TopKRouter`s route sixteen tokens on one rank, and parts of them on two or four, which are forked and meet with gloo. Gradients of data
parallel ranks are averaged, as `DistributedDataParallel` does, or added up and divided by all tokens where losses are taken for each token.
Nothing is learnt from but the balancing loss.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent, on_ranks

ROUTER = "megatron.core.transformer.moe.router"
UTILS = "megatron.core.transformer.moe.moe_utils"
RANKS, TOKENS, HIDDEN, EXPERTS = 2, 16, 8, 4
KIND = "global_aux_loss"
WAYS: Mapping[str, Mapping[str, Any]] = {
    "of 2 ranks": {"ranks": RANKS},
    "of 2 ranks, taken for each token": {"ranks": RANKS, "calculate_per_token_loss": True},
    "of 4 ranks, of which 2 share a sequence": {"ranks": 2 * RANKS, "tensor_parallel": RANKS},
}
TOLERANCE = 1e-4
"""Relative. Ranks add in another order than one does: fp32 rounding, 1e-7."""


def _run() -> Behaviour:
    prepare()
    seen, broken = [], False
    for name, asked in WAYS.items():
        alone = {key: each for key, each in asked.items() if key not in {"ranks", "tensor_parallel"}}
        one, several = (learnt(**each)["rank 0, gradient"] for each in ({"ranks": 1, **alone}, asked))
        times = sum(map(abs, several)) / sum(map(abs, one))
        apart = max(abs(found - right) for found, right in zip(several, one, strict=True)) / max(map(abs, one))
        broken |= apart > TOLERANCE
        seen.append(f"{name}: {times:.4f} times as large as of one, {apart:.1e} apart")
    return Behaviour(broken=broken, seen=f"gradients {'; '.join(seen)}")


def learnt(
    ranks: int, *, tensor_parallel: int = 1, padding: int = 0, trains: bool = True, steps: int = 1, **settings: Any
) -> dict[str, list[float]]:
    """Return what the weights of a router, [experts, hidden], learn on so many ranks, and the loss that is logged on each.

    Args:
        ranks: all of them.
        tensor_parallel: those of a replica of the model, with sequence parallelism where there are several.
        padding: how many tokens are masked at the end of each half.
        trains: whether the router is in training.
        steps: microbatches.
        settings: of the configuration.
    """
    return on_ranks(ranks, lambda _: _learnt(tensor_parallel, padding, steps, trains=trains, **settings))


def _learnt(tensor_parallel: int, padding: int, steps: int, *, trains: bool, **settings: Any) -> Mapping[str, Any]:
    import torch
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    router: Any = importlib.import_module(ROUTER).TopKRouter(
        _config(tensor_parallel, **settings), ProcessGroupCollection.use_mpu_process_groups()
    )
    router.set_layer_number(1)
    router.train(trains)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        router.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=generator))
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    for _ in range(steps):
        tokens = torch.randn(TOKENS, 1, HIDDEN, generator=generator).chunk(ranks)[rank]
        mask = torch.arange(TOKENS) % (TOKENS // RANKS) >= TOKENS // RANKS - padding
        mask = mask[:, None].chunk(ranks)[rank]
        probabilities, _ = router(tokens, padding_mask=mask) if padding else router(tokens)
        (probabilities * 0.0).sum().backward()
    gradient = torch.zeros_like(router.weight) if router.weight.grad is None else router.weight.grad
    torch.distributed.all_reduce(gradient)
    gradient /= TOKENS if settings.get("calculate_per_token_loss") else ranks // tensor_parallel
    return {"gradient": gradient, **_logged()}


def _config(tensor_parallel: int, **settings: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    asked = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": RANKS,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": KIND,
        "moe_aux_loss_coeff": 0.5,
        "tensor_model_parallel_size": tensor_parallel,
        "sequence_parallel": tensor_parallel > 1,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
    }
    return TransformerConfig(**{**asked, **settings})


def _logged() -> dict[str, Any]:
    """Return the losses that this rank logs, by name."""
    utils: Any = importlib.import_module(UTILS)
    if hasattr(utils, "get_moe_metrics_tracker"):
        return {name: each.values for name, each in utils.get_moe_metrics_tracker()._metrics.items()}  # noqa: SLF001
    return {name: each["values"] for name, each in utils.get_moe_layer_wise_logging_tracker().items()}


def prepare() -> None:
    """Import what ranks need before they are forked.

    Raises:
        TargetAbsent: no router balances over the global batch.
    """
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")  # 0.15 asks for it as it is imported
    import torch

    warnings.simplefilter("ignore")
    torch.cuda.current_device = lambda: torch.device("cpu")
    try:
        module = importlib.import_module(ROUTER)
    except ModuleNotFoundError as error:
        if not ROUTER.startswith(str(error.name)):
            raise
        raise TargetAbsent(f"there is no {ROUTER}") from error
    if not hasattr(module.TopKRouter, f"_apply_{KIND}"):
        raise TargetAbsent("no router balances over the global batch")
    utils: Any = importlib.import_module(UTILS)
    utils.te_general_gemm = getattr(utils, "te_general_gemm", None)  # 0.16 asks for it without Transformer Engine, too


CASES = (
    Case(
        name="data-parallel-cpu",
        overlay="global-aux-loss-scale",
        device="cpu",
        versions=("torch",),
        run=_run,
        targets=(ROUTER,),
    ),
)
