"""Layers that begin as they are to without the overlay: experts that read no latent, first projections of those that do, shared experts and
dense layers beside them, and experts whose projections all begin in one way."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, TargetAbsent, beside, on_ranks

PACK = beside(__file__)
CONFIG = "megatron.core.transformer.transformer_config"
SHARED = "megatron.core.transformer.moe.shared_experts"
DEEP = 8
"""Layers."""
SIZES = {"HIDDEN": 16, "LATENT": 8}


def _began(make: Callable[[Any], Any], *, only: str = "", **settings: Any) -> Mapping[str, object]:
    """Return the weights that a layer begins with, and the next random number.

    Args:
        make: gets a configuration with a latent, and returns the layer.
        only: what the names of weights have that are right without the overlay.
        settings: others than those of the reproducer.
    """
    import torch

    module: Any = importlib.import_module(CONFIG)
    if not hasattr(module.TransformerConfig, "moe_latent_size"):
        raise TargetAbsent("there is no latent MoE")
    for name in (PACK.EXPERTS, SHARED):
        importlib.import_module(name)
    if make is PACK._made_together and not hasattr(importlib.import_module(PACK.EXPERTS), "GroupedMLPSubmodules"):
        raise TargetAbsent("experts that are computed together are made of other parts")

    def run(_: int) -> Mapping[str, Any]:
        importlib.import_module("megatron.core.parallel_state").initialize_model_parallel()
        vars(PACK).update(SIZES)  # in this process alone
        theirs = module.TransformerConfig
        module.TransformerConfig = lambda **given: theirs(**{**given, **settings})
        torch.manual_seed(33)
        layer = make(PACK._config(DEEP))
        weights = {name: each for name, each in layer.named_parameters() if only in name}
        return {**weights, "next random number": torch.rand(1)}

    return on_ranks(1, run)


def _projections() -> Any:
    projections = importlib.import_module(PACK.PROJECTIONS)
    return importlib.import_module(PACK.SINGLE).MLPSubmodules(
        linear_fc1=projections.ColumnParallelLinear, linear_fc2=projections.RowParallelLinear
    )


def _dense(config: Any) -> Any:
    return importlib.import_module(PACK.SINGLE).MLP(config, _projections(), tp_group=PACK._groups().tp)


def _shared(config: Any) -> Any:
    experts = importlib.import_module(SHARED).SharedExpertMLP
    return experts(config, _projections(), gate=True, pg_collection=PACK._groups())


def _in_one_way(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def made(config: Any) -> Any:
        config.output_layer_init_method = config.init_method
        return make(config)

    return made


def _neighbour(name: str, make: Callable[[Any], Any], after: str, **asked: Any) -> Neighbour:
    run = functools.partial(_began, make, **asked)
    return Neighbour(name=name, overlay="latent-moe-fc2-init", run=run, after=after)


_ONE_BY_ONE, _TOGETHER = "sequential-cpu", "grouped-cpu"
NEIGHBOURS = (
    _neighbour("no-latent", PACK._made_one_by_one, _ONE_BY_ONE, moe_latent_size=None),
    _neighbour("first-projections", PACK._made_one_by_one, _ONE_BY_ONE, only="linear_fc1"),
    _neighbour("one-way-to-begin", _in_one_way(PACK._made_one_by_one), _ONE_BY_ONE),
    _neighbour("dense-layer", _dense, _ONE_BY_ONE),
    _neighbour("shared-experts", _shared, _ONE_BY_ONE, moe_shared_expert_intermediate_size=16),
    _neighbour("grouped-no-latent", PACK._made_together, _TOGETHER, moe_latent_size=None),
    _neighbour("grouped-first-projections", PACK._made_together, _TOGETHER, only="linear_fc1"),
)
