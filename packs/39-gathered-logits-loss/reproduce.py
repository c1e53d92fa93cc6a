"""Megatron's language models that gather their logits, on two tensor parallel ranks: is the loss that of one rank?

A real `GPTModel` runs forwards and backwards on one rank, and then on two, which are forked and meet with gloo. There it keeps its logits apart,
gathers them as it was made to (`parallel_output=False`), and gathers them as it is called (`runtime_gather_output=True`). A real
`HybridModel` of a linear layer does so, too, where the release has one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent

MODULE = "megatron.core.models.common.language_module.language_module"
GPT = "megatron.core.models.gpt.gpt_model"
HYBRID = "megatron.core.models.hybrid.hybrid_model"
LAYERS = "megatron.core.models.gpt.gpt_layer_specs"
CLASSES, HIDDEN, TOKENS, BATCH, RANKS = 16, 8, 6, 2, 2
WAYS: dict[str, tuple[bool, dict[str, bool]]] = {
    "apart": (True, {}),
    "gathered as made": (False, {}),
    "gathered as called": (True, {"runtime_gather_output": True}),
}
"""`parallel_output`, and what a model is called with."""
TOLERANCE = 1e-4
"""Relative, of the largest value. Ranks add in another order than one does: fp32 rounding, 1e-6."""

Make = Callable[[Any, bool], Any]


def _run(make: Make) -> Behaviour:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_on_rank, args=(make, rank, folder)) for rank in range(RANKS)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]
    seen, worst = [f"on one rank the loss is {found[0]['one rank']:.4f}"], 0.0
    for way in WAYS:
        apart = max(each[way]["apart"] for each in found)
        worst = max(worst, apart)
        seen.append(f"{way} {found[0][way]['loss']:.4f}, gradients {apart:.1e} apart")
    return Behaviour(broken=worst > TOLERANCE, seen="; ".join(seen))


def _on_rank(make: Make, rank: int, folder: str) -> None:
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.set_num_threads(1)
    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()  # of GPUs alone
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    loss, true = _learnt(_filled(make, 1, parallel=True), {})
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    report: dict[str, Any] = {"one rank": loss}
    for way, (parallel, more) in WAYS.items():
        model = _filled(make, RANKS, parallel=parallel)
        found, gradients = _learnt(model, more)
        apart = max(_apart(gradients[name], _share(each, true[name], RANKS)) for name, each in model.named_parameters())
        report[way] = {"loss": found, "apart": max(apart, abs(found / loss - 1))}
    Path(folder, str(rank)).write_text(json.dumps(report))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _apart(found: Any, true: Any) -> float:
    return float((found - true).abs().max() / true.abs().max())


def _learnt(model: Any, more: dict[str, bool]) -> tuple[float, dict[str, Any]]:
    """Run a model forwards and backwards, and return the mean loss and the gradient of each weight."""
    import torch

    generator = torch.Generator().manual_seed(2)
    tokens, labels = (torch.randint(0, CLASSES, (BATCH, TOKENS), generator=generator) for _ in range(2))
    positions = torch.arange(TOKENS).expand(BATCH, TOKENS)
    mask = torch.ones(1, 1, TOKENS, TOKENS).triu(1).bool()
    loss = model(tokens, positions, mask, labels=labels, **more).mean()
    loss.backward()
    return float(loss), {name: each.grad for name, each in model.named_parameters()}


def _filled(make: Make, ranks: int, *, parallel: bool) -> Any:
    """Return a model that has its share of the same weights, whatever the number of ranks."""
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        masked_softmax_fusion=False,
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,
    )
    model = make(config, parallel)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, each in sorted(model.named_parameters()):
            cut = _axis(each)
            shape = [size * (ranks if number == cut else 1) for number, size in enumerate(each.shape)]
            each.copy_(_share(each, torch.randn(*shape, generator=generator) * 0.5, ranks))
    return model


def _share(parameter: Any, whole: Any, ranks: int) -> Any:
    """Return what this rank has of a weight."""
    import torch

    cut = _axis(parameter)
    return whole if cut is None else whole.chunk(ranks, cut)[torch.distributed.get_rank() % ranks]


def _axis(parameter: Any) -> int | None:
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def _gpt(config: Any, parallel: bool) -> Any:
    layers = importlib.import_module(LAYERS).get_gpt_layer_local_spec()
    model: Any = importlib.import_module(GPT).GPTModel
    return model(config, layers, CLASSES, TOKENS, parallel_output=parallel)


def _hybrid(config: Any, parallel: bool) -> Any:
    """Return a model of one linear layer, of parts that need no GPU."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

    block = importlib.import_module("megatron.core.models.hybrid.hybrid_block")
    dropout = importlib.import_module("megatron.core.fusions.fused_bias_dropout").get_bias_dropout_add
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    linear: Any = functools.partial(MLP.as_mlp_submodule, submodules=parts)
    kind = importlib.import_module("megatron.core.ssm.mlp_layer").MLPLayer
    layer = ModuleSpec(module=kind, submodules=TransformerLayerSubmodules(mlp=linear, mlp_bda=dropout))
    submodules = block.HybridStackSubmodules(mlp_layer=layer)
    stack = ModuleSpec(module=block.HybridStack, submodules=submodules, params={"post_layer_norm": False})
    model: Any = importlib.import_module(HYBRID).HybridModel
    config.normalization = "LayerNorm"
    return model(config, stack, CLASSES, TOKENS, hybrid_layer_pattern="-", parallel_output=parallel)


def _prepared(make: Make, name: str) -> Callable[[], Behaviour]:
    def run() -> Behaviour:
        """Import what ranks need before they are forked.

        0.15 compiles something for a GPU as it is imported, and asks this variable for which where there is none.

        Raises:
            TargetAbsent: there is no such model, or it has no logits to gather.
        """
        import torch

        warnings.simplefilter("ignore")
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
        torch.cuda.current_device = lambda: torch.device("cpu")
        try:
            module = importlib.import_module(name)
            importlib.import_module(LAYERS)
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
            raise TargetAbsent(f"there is no {name}") from error
        model = getattr(module, "GPTModel" if name == GPT else "HybridModel")
        if "runtime_gather_output" not in inspect.signature(model.forward).parameters:
            raise TargetAbsent(f"{name} gathers no logits as it is called")
        return _run(make)

    return run


CASES = tuple(
    Case(
        name=f"{kind}-cpu",
        overlay="gathered-logits-loss",
        device="cpu",
        versions=("torch",),
        run=_prepared(make, name),
        targets=(MODULE,),
    )
    for kind, make, name in (("gpt", _gpt, GPT), ("hybrid", _hybrid, HYBRID))
)
