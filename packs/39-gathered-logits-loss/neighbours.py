"""Language models whose losses and logits are right without the overlay: with logits that are kept apart, and with gathered ones that
are returned, or that one rank has."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import warnings
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, TargetAbsent, beside, on_ranks

PACK = beside(__file__)
CONFIG = "megatron.core.transformer.transformer_config"


def _computed(
    ranks: int, make: Any, *, parallel: bool, labelled: bool = True, learns: bool = True, **settings: Any
) -> Mapping[str, object]:
    """Return the losses or logits of a model on so many ranks, and what its weights learn.

    Args:
        ranks: of tensor parallelism.
        make: makes the model of the reproducer.
        parallel: whether it keeps its logits apart.
        labelled: whether it gets labels, and takes a loss.
        learns: whether there are gradients.
        settings: others than those of the reproducer.
    """
    name = PACK.GPT if make is PACK._gpt else PACK.HYBRID
    _prepare(name)

    def run(_: int) -> Mapping[str, Any]:
        import torch
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        if hasattr(torch.compiler, "set_stance"):
            torch.compiler.set_stance("force_eager")  # what is compiled is the same code
        get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()  # of GPUs alone
        module: Any = importlib.import_module(CONFIG)
        theirs = module.TransformerConfig
        module.TransformerConfig = lambda **given: theirs(**{**given, **settings})
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
        model = PACK._filled(make, ranks, parallel=parallel)
        generator = torch.Generator().manual_seed(2)
        tokens, labels = (
            torch.randint(0, PACK.CLASSES, (PACK.BATCH, PACK.TOKENS), generator=generator) for _ in range(2)
        )
        positions = torch.arange(PACK.TOKENS).expand(PACK.BATCH, PACK.TOKENS)
        mask = torch.ones(1, 1, PACK.TOKENS, PACK.TOKENS).triu(1).bool()
        with torch.set_grad_enabled(learns):
            found = model(tokens, positions, mask, labels=labels if labelled else None)
        if not learns:
            return {"output": found}
        (found * torch.randn(found.shape, generator=generator)).sum().backward()
        learnt = {f"gradient of {name}": each.grad for name, each in model.named_parameters()}
        return {"output": found, **learnt}

    return on_ranks(ranks, run)


def _prepare(name: str) -> None:
    """Import what ranks need before they are forked.

    Raises:
        TargetAbsent: there is no such model.
    """
    import torch

    warnings.simplefilter("ignore")
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")  # 0.15 asks for it as it is imported
    torch.cuda.current_device = lambda: torch.device("cpu")
    try:
        for each in (name, PACK.LAYERS):
            importlib.import_module(each)
    except ModuleNotFoundError as error:
        if not name.startswith(str(error.name)):
            raise
        raise TargetAbsent(f"there is no {name}") from error


def _neighbour(name: str, ranks: int, make: Any = PACK._gpt, **asked: Any) -> Neighbour:
    return Neighbour(name=name, overlay="gathered-logits-loss", run=functools.partial(_computed, ranks, make, **asked))


NEIGHBOURS = (
    _neighbour("apart", 2, parallel=True),
    _neighbour("apart-fused", 2, parallel=True, cross_entropy_loss_fusion=True),
    _neighbour("apart-no-gradients", 2, parallel=True, learns=False),
    _neighbour("apart-hybrid", 2, PACK._hybrid, parallel=True),
    _neighbour("gathered-no-labels", 2, parallel=False, labelled=False),
    _neighbour("gathered-one-rank-no-gradients", 1, parallel=False, learns=False),
)
