"""Random numbers saved for the backward pass where torch.compile's activation budget would draw them again.

Upstream's choice of saved values is extended by each random value that the backward pass would recompute: the seeds of a graph with Inductor, masks of dropout
with other backends. Attention without dropout draws no numbers, and regions that the model checkpoints itself keep their random state in another way: both are unchanged.
Compiled graphs have their own keys in torch's cache, so that no graph is loaded that was partitioned without this overlay.

Source: https://github.com/pytorch/pytorch/issues/190758, https://github.com/pytorch/pytorch/pull/190759
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import compile_budget_dropout as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Target, Thread

_CHANCE = "dropout_p"
"""Argument of attention; without dropout it draws nothing."""
_SUFFIX = "_random_kept"
"""Suffix of keys in torch's cache of compiled graphs."""


def _make(original: Callable[..., list[Any]], module: ModuleType) -> Callable[..., list[Any]]:
    def choose_saved_values_set(joint_graph: Any, node_info: Any, *arguments: Any, **more: Any) -> list[Any]:
        saved = original(joint_graph, node_info, *arguments, **more)
        drawn = _drawn_again(module, node_info, saved)
        return [*saved, *(node for node in joint_graph.nodes if node in drawn)] if drawn else saved

    return choose_saved_values_set


def _drawn_again(module: ModuleType, node_info: Any, saved: Sequence[Any]) -> set[Any]:
    """Return random values that the backward pass would compute again.

    Args:
        module: upstream's partitioner.
        node_info: which nodes of the joint graph belong to which pass.
        saved: nodes whose values are kept for the backward pass.
    """
    seen, drawn = {*saved, *node_info.inputs}, set()
    waiting = list(node_info.required_bw_nodes)
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node in seen or node_info.is_required_bw(node):
                continue
            seen.add(node)
            if _draws(module, node) or (node.target is operator.getitem and _draws(module, node.args[0])):
                drawn.add(node)
            else:
                waiting.append(node)
    return drawn


def _draws(module: ModuleType, node: Any) -> bool:
    """Return whether a node draws random numbers that nothing else restores."""
    target = node.target
    if module.torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()) or module.must_recompute(node):
        return False
    for position, argument in enumerate(target._schema.arguments):  # noqa: SLF001 - as torch.compile reads it
        if argument.name == _CHANCE:
            given = node.args[position] if position < len(node.args) else argument.default_value
            return bool(node.kwargs.get(_CHANCE, given) != 0)
    return True


def observe(module: ModuleType) -> Observation:
    """Choose the saved values, with a budget of zero, of a graph whose backward pass needs random numbers."""
    import torch

    graph = torch.fx.Graph()
    given = graph.placeholder("given")
    noise = graph.call_function(torch.ops.aten.rand_like.default, (given,))
    loss = graph.call_function(torch.ops.aten.mul.Tensor, (given, noise))
    gradient = graph.call_function(torch.ops.aten.mul.Tensor, (loss, noise))
    graph.output((loss, gradient))
    info = module.NodeInfo(
        inputs=[given],
        _required_fw_nodes=module.OrderedSet([given, noise, loss]),
        required_bw_nodes=module.OrderedSet([gradient]),
        tangents_closure=module.OrderedSet(),
        unclaimed_nodes=module.OrderedSet(),
        fw_order={given: 0, noise: 1, loss: 2},
        static_lifetime_input_nodes=module.OrderedSet(),
    )
    saved = getattr(module, feature.TARGET.symbol)(graph, info, 0)
    names = ", ".join(node.name for node in saved)
    return Observation(broken=noise not in saved, seen=f"of random numbers and their input is saved: {names}")


def _of_their_own(original: Callable[..., tuple[str, Any]], _module: ModuleType) -> Callable[..., tuple[str, Any]]:
    def autograd_cache_key(*arguments: Any, **more: Any) -> tuple[str, Any]:
        key, lines = original(*arguments, **more)
        return f"{key}{_SUFFIX}", lines

    return autograd_cache_key


def observe_key(module: ModuleType) -> Observation:
    """Ask for the key of an object that is no graph, which torch makes up."""
    import random

    import torch._functorch.config as settings

    before = random.getstate()
    try:
        with settings.patch(bypass_autograd_cache_key=True):
            key, _ = getattr(module, feature.CACHE.symbol)(SimpleNamespace(meta={}), (), None, None)
    finally:
        random.setstate(before)
    is_own = key.endswith(_SUFFIX)
    return Observation(
        broken=not is_own,
        seen=f"keys of cached graphs {'say' if is_own else 'do not say'} that random numbers are kept",
    )


def _part(
    target: Target,
    probe: Callable[..., Any],
    shape: str,
    make: Callable[..., Any],
    check: Callable[[ModuleType], Observation],
) -> Overlay:
    return Overlay(
        id="compile-budget-dropout",
        pack=61,
        title="keep random numbers where torch.compile's activation budget draws them anew",
        target=target,
        probe=probe,
        replacements={shape: (Replacement(symbol=target.symbol, make=make),)},
        unsupported={},
        witness=check,
        self_test=check,
        opt_in=False,
        needs_parts=() if target == feature.CACHE else (feature.CACHE.module,),
        symptoms=(
            "training is worse with torch.compile and activation_memory_budget",
            "gradients do not belong to the dropout mask of the forward pass",
            "dropout and torch.compile: gradients are wrong",
        ),
        concerns="every model",
        breaks="with torch.compile and an activation_memory_budget below 1 the backward pass draws dropout anew: gradients belong to another mask than the loss",
        retire_when="the partitioner saves random numbers at every budget",
        brief="dropout with a memory budget",
        until="random numbers are saved",
        threads=(
            Thread(repository="pytorch/pytorch", number=190758, state="open, reported 2026-07-22"),
            Thread(repository="pytorch/pytorch", number=190717, state="open, reported 2026-07-21"),
            Thread(repository="pytorch/pytorch", number=190759, state="open, opened 2026-07-22"),
        ),
        last_validated="2026-11-28, x86-64 without GPU: torch 2.11.0, 2.13.0 and 2.15.0; H200, driver 580.159.04: torch 2.11.0; 2.11.0 to 2.15.0 read",
    )


PARTS = (
    _part(feature.TARGET, feature.probe, feature.DRAWN_AGAIN, _make, observe),
    _part(feature.CACHE, feature.probe_cache, feature.CACHED, _of_their_own, observe_key),
)
