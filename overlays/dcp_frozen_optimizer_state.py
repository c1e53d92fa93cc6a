"""Loading of the optimizer state of frozen parameters from torch's distributed checkpoints.

Upstream loads the state of parameters that require a gradient. Here frozen parameters with state in the checkpoint require a gradient while upstream loads, so nested, flat, whole
and broadcast checkpoints are distributed and loaded by upstream's code. Where an optimizer has state of other parameters only, upstream's function first makes the state of frozen ones.
Afterwards they are frozen again. `FullyShardedDataParallel`, which has its own parameters, is left to upstream.

Source: https://github.com/pytorch/pytorch/issues/192202
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from types import ModuleType
from typing import Any

from megacpp_overlays.feature_probes import dcp_frozen_optimizer_state as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread

_STATE, _PARAMETERS, _MOMENT = "state", "params", "moment"


def _make(original: Callable[..., None], module: ModuleType) -> Callable[..., None]:
    def load_optim_state_dict(model: Any, optimizers: Sequence[Any], state_dict: Mapping[str, Any], info: Any) -> None:
        if not info.handle_optim or info.fsdp_modules:
            original(model, optimizers, state_dict, info)
            return
        frozen = [list(_frozen(optim)) for optim in optimizers]
        saved = _saved(module, info, state_dict, [each for its in frozen for each in its])
        frozen = [[each for each in its if not saved.isdisjoint(_names(info, each))] for its in frozen]
        with _requiring_gradients([each for its in frozen for each in its]):
            for optim, its in zip(optimizers, frozen, strict=True):
                _make_state(module, optim, its)
            original(model, optimizers, state_dict, info)

    return load_optim_state_dict


def _frozen(optim: Any) -> Iterator[Any]:
    """Yield the parameters of an optimizer that are frozen and could have a gradient."""
    for group in optim.param_groups:
        for each in group[_PARAMETERS]:
            if not each.requires_grad and (each.is_floating_point() or each.is_complex()):
                yield each


def _names(info: Any, parameter: Any) -> Collection[str]:
    """Return the names of a parameter in a checkpoint; one that several modules share has several."""
    names: Collection[str] = info.fqn_param_mapping.get(parameter, ())
    return names


def _saved(module: ModuleType, info: Any, state_dict: Mapping[str, Any], parameters: Collection[Any]) -> set[str]:
    """Return the names of parameters whose state a checkpoint has; where the first rank alone has the checkpoint, all ranks get them from it."""
    saved = {name for each in parameters for name in _names(info, each)}
    if _STATE in state_dict:
        saved = {name for name in saved if state_dict[_STATE].get(name)}
    elif saved:
        saved.intersection_update(_flat_names(state_dict))
    if info.broadcast_from_rank0:
        shared = [saved]
        module.dist.broadcast_object_list(shared, src=0)
        (saved,) = shared
    return saved


def _flat_names(state_dict: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of parameters, and other beginnings, of keys like `state.layer.weight.exp_avg` of a flat checkpoint."""
    for key in state_dict:
        first, *parts = key.split(".")
        if first == _STATE:
            yield from accumulate(parts, "{}.{}".format)


@contextmanager
def _requiring_gradients(parameters: Collection[Any]) -> Iterator[None]:
    try:
        for each in parameters:
            each.requires_grad_(True)
        yield
    finally:
        for each in parameters:
            each.requires_grad_(False)


def _make_state(module: ModuleType, optim: Any, parameters: Collection[Any]) -> None:
    """Make the state of parameters that have none, in an optimizer that has state of others; upstream does it in one that has none."""
    kept = optim.state
    lacking = {id(each) for each in parameters if not kept.get(each)}
    if not kept or not lacking:
        return
    groups = [(group, group[_PARAMETERS]) for group in optim.param_groups]
    try:
        optim.state = defaultdict(dict)
        for group, every in groups:
            group[_PARAMETERS] = [each for each in every if id(each) in lacking]
        module._init_optim_state(optim)  # noqa: SLF001 - as upstream
        kept.update(optim.state)
    finally:
        optim.state = kept
        for group, every in groups:
            group[_PARAMETERS] = every


class _Optimizer:
    """Optimizer that records the loaded state; one of `torch.optim` would import torch.compile."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self.state: dict[Any, dict[str, Any]] = {each: {_MOMENT: each.detach()} for each in parameters}
        self.param_groups: list[dict[str, Any]] = [{_PARAMETERS: list(parameters)}]
        self.loaded: list[str] = []

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the names of parameters that state was found of."""
        self.loaded = list(state_dict[_STATE])


def observe(module: ModuleType) -> Observation:
    """Load the state of a parameter that learns and of one that is frozen."""
    import torch

    with torch.inference_mode(False):
        model = torch.nn.Module()
        for name, learns in (("learning", True), ("frozen", False)):
            model.register_parameter(name, torch.nn.Parameter(torch.ones(1, device="cpu"), requires_grad=learns))
        optim, names = _Optimizer(list(model.parameters())), ["learning", "frozen"]
        saved = {_STATE: {name: {_MOMENT: 1.0} for name in names}, "param_groups": [{_PARAMETERS: names}]}
        module.set_optimizer_state_dict(model, [optim], saved)
    return Observation(broken=optim.loaded == ["learning"], seen=f"state is loaded of {', '.join(optim.loaded)}")


OVERLAY = Overlay(
    id="dcp-frozen-optimizer-state",
    pack=75,
    title="load the optimizer state of frozen parameters from torch's distributed checkpoints",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.DROPPED: (Replacement(symbol=feature.TARGET.symbol, make=_make),)},
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "moments of a layer that was frozen for a while are zero when it learns again",
        "optimizer state of frozen parameters is missing after set_optimizer_state_dict",
        "a checkpoint is smaller than the one that it was loaded from, and some layers are frozen",
    ),
    concerns="every model",
    breaks="state of parameters that are frozen when torch's distributed checkpoints load an optimizer is dropped: it is missing from the next checkpoint, and where they learn again later, "
    "their moments and counters begin anew",
    retire_when="_split_optim_state_dict and _unflatten_optim_state_dict take the state that a checkpoint has",
    brief="frozen state in DCP",
    until="loading takes all state",
    threads=(
        Thread(repository="pytorch/pytorch", number=192202, state="open, opened 2026-08-05"),
        Thread(repository="pytorch/pytorch", number=192307, state="open, opened 2026-08-06, repairs it"),
    ),
    last_validated="2026-11-30, x86-64 without GPU: torch 2.11.0 and 2.15.0; 2.11.0 to 2.15.0 read",
)
