"""Megatron's attention with learnable sinks on two tensor parallel ranks: are the sinks of both in the norm that gradients are clipped by?

A real `SelfAttention` with a real `DotProductAttention` runs forwards and backwards on one rank, and then on two, which are forked and meet with
gloo. A real `FP32Optimizer` takes the norm and clips, once with all weights and once with sinks alone, as where the rest is frozen. Megatron makes a few scalars on a GPU; they are made on the CPU here.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent, cpu_for_gpu

MODULE = "megatron.core.transformer.attention"
CORE = "megatron.core.transformer.dot_product_attention"
HIDDEN, HEADS, TOKENS, RANKS = 16, 4, 8, 2
SINKS = "softmax_offset"
LIMIT = 0.1
"""What gradients are clipped to."""
TOLERANCE = 1e-5
"""Relative. Ranks add in another order than one does: fp32 rounding, 1e-7."""


def _run() -> Behaviour:
    module = _module()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_on_rank, args=(module, rank, folder)) for rank in range(RANKS)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]
    said = {kind: _said([each[kind] for each in found]) for kind in ("of all weights", "of sinks")}
    return Behaviour(
        broken=any(apart > TOLERANCE for apart, _ in said.values()),
        seen="; ".join(f"{kind}, {seen}" for kind, (_, seen) in said.items()),
    )


def _said(found: list[Any]) -> tuple[float, str]:
    """Return how far ranks are from one rank, and in words."""
    true = found[0]["on one rank"]
    clipped = max(each["apart"] for each in found)
    apart = max(abs(each["norm"] / true - 1) for each in found)
    seen = f"the norm is {found[0]['norm']:.5f} on {RANKS} ranks and {true:.5f} on one, and clipped gradients are {clipped:.1e} apart"
    return max(apart, clipped), seen


def _on_rank(module: Any, rank: int, folder: str) -> None:
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    kinds = {"of all weights": "", "of sinks": SINKS}
    with cpu_for_gpu():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
        true = {kind: _clipped(module, 1, word) for kind, word in kinds.items()}
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
        found = {kind: _clipped(module, RANKS, word) for kind, word in kinds.items()}
    report = {
        kind: {
            "norm": norm,
            "on one rank": true[kind][0],
            "apart": max(_apart(each, _share(name, true[kind][1][name], RANKS)) for name, each in gradients.items()),
        }
        for kind, (norm, gradients) in found.items()
    }
    Path(folder, str(rank)).write_text(json.dumps(report))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _apart(found: Any, true: Any) -> float:
    return float((found - true).abs().max() / true.abs().max())


def _clipped(module: Any, ranks: int, word: str) -> tuple[float, dict[str, Any]]:
    """Run an attention forwards and backwards and clip gradients; return their norm, and what they are then.

    Args:
        module: of the attention.
        ranks: how many there are.
        word: in the names of the weights that an optimizer has.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    attention = _build(module, ranks)
    generator = torch.Generator().manual_seed(2)
    hidden, weights = (torch.randn(TOKENS, 1, HIDDEN, generator=generator) for _ in range(2))
    output, _ = attention(hidden, torch.ones(1, 1, TOKENS, TOKENS).triu(1).bool())
    (output * weights).sum().backward()
    trained = {name: each for name, each in attention.named_parameters() if word in name}
    settings = OptimizerConfig(optimizer="sgd", clip_grad=LIMIT)
    optimizer = FP32Optimizer(torch.optim.SGD(trained.values(), lr=1.0), settings, lambda *_: None)
    optimizer.grad_stats_parallel_group = parallel_state.get_model_parallel_group()
    optimizer.tp_group = parallel_state.get_tensor_model_parallel_group()
    norm = optimizer.clip_grad_norm(LIMIT)
    return float(norm), {name: each.grad for name, each in trained.items()}


def _build(module: Any, ranks: int) -> Any:
    """Return an attention that has its share of the same weights, whatever the number of ranks."""
    import torch
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        softmax_type="learnable",
        attention_dropout=0.0,
        add_bias_linear=False,
        masked_softmax_fusion=False,
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,
    )
    parts = module.SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=importlib.import_module(CORE).DotProductAttention,
        linear_proj=RowParallelLinear,
    )
    attention = module.SelfAttention(config, parts, layer_number=1, attn_mask_type=AttnMaskType.causal)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, each in sorted(attention.named_parameters()):
            shape = [size * (ranks if number == _axis(name) else 1) for number, size in enumerate(each.shape)]
            each.copy_(_share(name, torch.randn(*shape, generator=generator) * 0.3, ranks))
    return attention


def _share(name: str, whole: Any, ranks: int) -> Any:
    """Return what this rank has of a weight."""
    import torch

    return whole.chunk(ranks, _axis(name))[torch.distributed.get_rank() % ranks]


def _axis(name: str) -> int:
    return int(name == "linear_proj.weight")


def _module() -> Any:
    """Return the module of the attention.

    0.15 compiles something for a GPU as it is imported, and asks this variable for which where there is none.

    Raises:
        TargetAbsent: it has no sinks.
    """
    import torch

    warnings.simplefilter("ignore")
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    torch.cuda.current_device = lambda: torch.device("cpu")
    try:
        module: Any = importlib.import_module(MODULE)
        core = importlib.import_module(CORE)
    except ModuleNotFoundError as error:
        if not CORE.startswith(str(error.name)) and not MODULE.startswith(str(error.name)):
            raise
        raise TargetAbsent(f"there is no {error.name}") from error
    if not hasattr(core.DotProductAttention, "sharded_state_dict"):
        raise TargetAbsent("attention has no sinks")
    return module


CASES = (
    Case(name="norm-cpu", overlay="tp-attention-sinks", device="cpu", versions=("torch",), run=_run, targets=(MODULE,)),
)
