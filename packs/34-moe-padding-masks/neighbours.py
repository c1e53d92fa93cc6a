"""Routers that count right without the overlay, and stages of MoE models whose padding masks are right without it."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, TargetAbsent, beside, on_ranks

PACK = beside(__file__)
EXPERTS = "megatron.core.models.gpt.moe_module_specs"


def _counted(tokens: int, *, masked: int | None, learns: bool = True, **asked: Any) -> Mapping[str, object]:
    """Return what a router counts, computes and learns from its balancing loss.

    Args:
        tokens: how many.
        masked: how many of them are padding; None for no mask.
        learns: whether a second call, which has the mask, has gradients; the first one has them.
        asked: settings of the router.
    """
    router_module = _imported(PACK.ROUTER, "TopKRouter", "_apply_expert_bias")

    def run(_: int) -> Mapping[str, Any]:
        import torch

        _prepare()
        generator = torch.Generator().manual_seed(1)
        router = router_module.TopKRouter(PACK._config(1, **asked), PACK._groups(1))
        with torch.no_grad():
            router.weight.copy_(torch.randn(router.weight.shape, generator=generator))
        states = torch.randn(tokens, 1, PACK.HIDDEN, generator=generator)
        mask = () if masked is None else ((torch.arange(tokens) >= tokens - masked)[:, None],)
        first, _ = router(states)
        with torch.set_grad_enabled(learns):
            scores, chosen = router(states, *mask)
        (first.square().sum() + scores.square().sum()).backward()
        counts = getattr(router, "local_tokens_per_expert", None)
        counted = {} if counts is None else {"counts": counts}
        return {"scores": scores, "chosen": chosen, "gradient of weight": router.weight.grad, **counted}

    return on_ranks(1, run)


def _stage(ranks: int, *, embeds: bool, mask: str) -> Mapping[str, object]:
    """Return what a stage of a model on so many ranks computes, and what its weights learn.

    Args:
        ranks: of tensor parallelism; with one there is no sequence parallelism.
        embeds: whether it is the first stage.
        mask: `whole`, `own` for the part of the rank, or `none`.
    """
    _imported(PACK.MODEL, "GPTModel", "_preprocess")
    importlib.import_module(EXPERTS)

    def run(rank: int) -> Mapping[str, Any]:
        import torch

        _prepare()
        vars(PACK)["RANKS"] = ranks  # of the model, in this process alone
        model = PACK._model(PACK._groups(ranks), pre_process=embeds)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for each in model.parameters():
                each.copy_(torch.randn(each.shape, generator=generator))
        ids = torch.randint(0, 16, (PACK.ROWS, PACK.TOKENS), generator=generator)
        states, slope = (
            torch.randn(PACK.TOKENS, PACK.ROWS, PACK.HIDDEN, generator=generator).chunk(ranks)[rank].clone()
            for _ in range(2)
        )
        if not embeds:
            model.set_input_tensor(states.requires_grad_())
        whole = torch.tensor(PACK._mask())
        given = {"whole": whole, "own": whole.chunk(ranks, dim=1)[rank], "none": None}[mask]
        output = model(input_ids=ids if embeds else None, position_ids=None, attention_mask=None, padding_mask=given)
        (output * slope).sum().backward()
        learnt = {f"gradient of {name}": each.grad for name, each in model.named_parameters() if each.grad is not None}
        return {"output": output, **({} if embeds else {"gradient of states": states.grad}), **learnt}

    return on_ranks(ranks, run)


def _imported(name: str, owner: str, method: str) -> Any:
    """Return a module.

    Raises:
        TargetAbsent: the method takes no padding mask.
    """
    module = importlib.import_module(name)
    function = getattr(getattr(module, owner), method, None)
    if function is None or "padding_mask" not in inspect.signature(function).parameters:
        raise TargetAbsent(f"{owner} takes no padding mask")
    return module


def _prepare() -> None:
    """Let Megatron run on the CPU, as the reproducer does."""
    import torch

    torch.cuda.current_device = lambda: "cpu"  # where Megatron puts what it makes
    if hasattr(torch.compiler, "set_stance"):
        torch.compiler.set_stance("force_eager")  # what is compiled is the same code
    utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    utils.te_general_gemm = getattr(utils, "te_general_gemm", None)


def _bias(name: str, tokens: int, *, masked: int | None, learns: bool = True, biased: bool = True) -> Neighbour:
    run = functools.partial(_counted, tokens, masked=masked, learns=learns, moe_router_enable_expert_bias=biased)
    return Neighbour(name=name, overlay="expert-bias-padding-mask", run=run)


def _of_stage(name: str, ranks: int, *, embeds: bool, mask: str) -> Neighbour:
    run = functools.partial(_stage, ranks, embeds=embeds, mask=mask)
    return Neighbour(name=name, overlay="pipeline-padding-mask", run=run)


NEIGHBOURS = (
    _bias("no-mask", PACK.EXPERTS + 2, masked=None),
    _bias("mask-of-nothing", PACK.EXPERTS, masked=0),
    _bias("no-expert-bias", PACK.EXPERTS + 2, masked=3, biased=False),
    _bias("no-gradients", PACK.EXPERTS + 2, masked=3, learns=False),
    _of_stage("first-stage", 2, embeds=True, mask="whole"),
    _of_stage("first-stage-no-mask", 2, embeds=True, mask="none"),
    _of_stage("later-stage-no-mask", 2, embeds=False, mask="none"),
    _of_stage("later-stage-own-mask", 2, embeds=False, mask="own"),
    _of_stage("later-stage-one-rank", 1, embeds=False, mask="whole"),
)
