"""Exclusion of modules from recomputation where Megatron's local CUDA graphs would lose their gradients.

A local graph gives gradients to the parameters that a walk back from its outputs finds. Modules recomputed by `CheckpointWithoutOutput`
are not on that path, so layer norms, MLA's up projections and the gated norm of linear attention keep gradients of zero, without a log line.

Where local graphs capture such a module, it is no longer recomputed: before a layer is made, the module is removed from
`recompute_modules` of its configuration, with a warning. Gradients are right then, at the cost of the memory that recomputation saves.
Graphs are not changed. `moe_act` has no parameters, and the other modules are not recomputed in a graph.

Graphs of Transformer Engine, and of a whole iteration, do not look for parameters in this way and are not changed.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6373
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import graph_hidden_recompute_grads as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread

_IN_ATTENTION = frozenset({"mla_up_proj", "gdn_norm_out"})
_HIDDEN = _IN_ATTENTION | {"layernorm"}
"""Modules that `CheckpointWithoutOutput` recomputes and whose parameters are used nowhere else."""
_LAYERS = frozenset({"attn", "mlp", "moe"})
"""Graph modules that capture whole layers of some kind, attention included."""
_ROUTERS = frozenset({"moe_router", "moe_preprocess"})
"""Graph modules that capture the norm before the experts, and no attention."""
_trying = threading.local()
"""`on`: whether this thread makes a layer of an observation, for which no warning is logged."""


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    said: set[tuple[str, ...]] = set()

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it becomes a constructor
        if lost := _lost(config):
            config.recompute_modules = [each for each in config.recompute_modules if each not in lost]
            if lost not in said and not getattr(_trying, "on", False):
                said.add(lost)
                _warn(lost)
        original(self, config, *args, **kwargs)

    return __init__


def _lost(config: Any) -> tuple[str, ...]:
    """Return the recomputed modules of a configuration whose gradients a local graph would lose."""
    if config.cuda_graph_impl != "local" or config.recompute_granularity != "selective":
        return ()
    captured = {each.name for each in (_modules(config) or ())}
    whole = not captured and getattr(getattr(config, "inference_cuda_graph_scope", None), "name", None) != "block"
    hidden: frozenset[str] = frozenset()
    if whole or captured & _LAYERS:
        hidden = _HIDDEN
    elif captured & _ROUTERS:
        hidden = _HIDDEN - _IN_ATTENTION
    return tuple(dict.fromkeys(each for each in config.recompute_modules if each in hidden))


def _modules(config: Any) -> Any:
    """Return the modules that graphs capture. 0.18.0 renamed the field, and empties the old one."""
    return config.cuda_graph_modules if hasattr(config, "cuda_graph_modules") else config.cuda_graph_scope


def _warn(lost: tuple[str, ...]) -> None:
    """Warn on every rank: with pipeline parallelism their configurations may differ."""
    from torch import distributed

    together = distributed.is_available() and distributed.is_initialized()
    logging.getLogger("megacpp_overlays").warning(
        "[megacpp_overlays] %slocal CUDA graphs would lose the gradients of recomputed modules: %s "
        "(NVIDIA/Megatron-LM#6373): they are kept in memory and not recomputed; to save the memory set "
        "cuda_graph_impl='none'; MEGACPP_OVERLAY_GRAPH_HIDDEN_RECOMPUTE_GRADS=off lets gradients be lost",
        f"rank {distributed.get_rank()}: " if together else "",
        ", ".join(lost),
    )


def observe(module: ModuleType) -> Observation:
    """Observe `recompute_modules` after the constructors of real layers have begun, with local graphs and without graphs."""
    found = {graphs: _left(module, graphs) for graphs in ("local", "none")}
    return Observation(
        broken=found != {"local": ["core_attn"], "none": ["layernorm", "core_attn"]},
        seen=f"recomputed of layernorm and core_attn: with local graphs {found['local']}, without graphs {found['none']}",
    )


class _EnoughError(Exception):
    """Signal that ends a constructor."""


def _left(module: Any, graphs: str) -> list[str]:
    """Return `recompute_modules` once a layer's own constructor has begun."""

    class Begun(module.TransformerLayer):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            raise _EnoughError  # the constructor cannot go on without submodules

    config = SimpleNamespace(
        cuda_graph_impl=graphs,
        cuda_graph_modules=[],
        cuda_graph_scope=[],
        recompute_granularity="selective",
        recompute_modules=["layernorm", "core_attn"],
    )
    _trying.on = True
    try:
        with suppress(_EnoughError):
            Begun(config, None)
    finally:
        _trying.on = False
    return list(config.recompute_modules)


OVERLAY = Overlay(
    id="graph-hidden-recompute-grads",
    pack=40,
    title="recompute nothing whose gradients local CUDA graphs would lose",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.NOT_FOUND: (Replacement(symbol=feature.METHOD, make=_make),)},
    unsupported={},
    witness=None,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "layer norms do not learn with CUDA graphs and recompute",
        "gradients are zero with cuda_graph_impl local",
        "grad_norm is too small with CUDA graphs",
    ),
    concerns="local_graphs and recompute",
    breaks="with local CUDA graphs, layer norms and MLA's up projections that are recomputed learn nothing",
    retire_when="local CUDA graphs find the parameters that only recomputed code uses",
    brief="gradients lost in local CUDA graphs",
    until="graphs find parameters of recompute",
    threads=(Thread(repository="NVIDIA/Megatron-LM", number=6373, state="merged 2026-08-14, in no release"),),
    last_validated="2026-11-23, x86-64 without GPU, torch 2.11.0: megatron-core 0.16.1, 0.17.1, 0.18.2 and 0.19.2; 0.9.0 to 0.19.2 and main "
    "d98e8a64dd read. H200: graphs of 0.19.2",
)
