"""State of an optimizer without a step, as torch's distributed checkpoints initialize it.

Upstream makes the state by a step with gradients and learning rates of zero. Here weight decay is zero as well in that step, so moments stay zero.
Afterwards counters are zero, and state that `torch.optim` starts with another value has that value. Tensors stay those that upstream made: a checkpoint
may be loaded into them. An optimizer that has state, or parameters with gradients, is left to upstream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from types import ModuleType
from typing import Any

from megacpp_overlays.feature_probes import dcp_fresh_optimizer_state as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread

_STEP, _RATE, _DECAY = "step", "lr", "weight_decay"
_FIRST: Mapping[str, Mapping[str, float | str]] = {
    "NAdam": {"mu_product": 1.0},
    "ASGD": {"eta": _RATE},
    "Rprop": {"step_size": _RATE},
}
"""State of optimizers of `torch.optim` that does not begin with zero: a number, or the name of a setting of its group."""


def _make(original: Callable[[Any], None], _module: ModuleType) -> Callable[[Any], None]:
    def init_optim_state(optim: Any) -> None:
        if optim.state:
            original(optim)
            return
        decays = [(group, group[_DECAY]) for group in optim.param_groups if _DECAY in group]
        counting = [group for group in optim.param_groups if not group.get(_STEP)]
        try:
            for group, _ in decays:
                group[_DECAY] = 0.0
            original(optim)
        finally:
            for group, decay in decays:
                group[_DECAY] = decay
        if optim.state:
            _begin_anew(optim)
            for group in counting:
                if _STEP in group:  # fused optimizers count there
                    _set(group, _STEP, 0)

    return init_optim_state


def _begin_anew(optim: Any) -> None:
    """Reset state that a step without gradients, rates and decay has changed to its values before a first step."""
    import torch

    first: dict[str, float | str] = {_STEP: 0.0}
    for name, kept in _FIRST.items():
        if isinstance(optim, getattr(torch.optim, name)):
            first |= kept
    for group in optim.param_groups:
        for parameter in group["params"]:
            state = optim.state.get(parameter, {})
            for name, value in first.items():
                if name in state:
                    _set(state, name, group[value] if isinstance(value, str) else value)


def _set(state: MutableMapping[Any, Any], name: str, value: Any) -> None:
    """Set a number, or every element of a tensor, which stays that tensor."""
    import torch

    kept = state[name]
    if isinstance(kept, torch.Tensor):
        with torch.no_grad():
            kept.fill_(complex(value, value) if kept.is_complex() else value)  # as Rprop begins
    elif isinstance(kept, int | float):
        state[name] = type(kept)(value)


class _FirstStepOptimizer:
    """Optimizer with coupled weight decay; one of `torch.optim` would import torch.compile."""

    def __init__(self, weight: Any) -> None:
        self.state: dict[Any, dict[str, Any]] = {}
        self.param_groups: list[dict[str, Any]] = [{"params": [weight], _RATE: 0.5, _DECAY: 0.5}]

    def step(self, closure: None) -> None:
        """Make the state of a first step."""
        (group,) = self.param_groups
        for each in group["params"]:
            moment = each.grad + group[_DECAY] * each.detach()
            self.state[each] = {_STEP: moment.new_ones(()), "exp_avg": moment}

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget gradients."""
        for each in self.param_groups[0]["params"]:
            each.grad = None


def observe(module: ModuleType) -> Observation:
    """Make the state of an optimizer that has taken no step."""
    import torch

    weight = torch.nn.Parameter(torch.ones(1, device="cpu"))
    optim = _FirstStepOptimizer(weight)
    getattr(module, feature.TARGET.symbol)(optim)
    found = {name: float(value) for name, value in optim.state[weight].items()}
    return Observation(broken=any(found.values()), seen=f"a fresh optimizer has {found}")


OVERLAY = Overlay(
    id="dcp-fresh-optimizer-state",
    pack=59,
    title="leave a fresh optimizer fresh where torch's distributed checkpoints ask for its state",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.STEPPED: (Replacement(symbol=feature.TARGET.symbol, make=_make),)},
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "first update is too small after get_optimizer_state_dict",
        "Adam's step counter is 1 before the first step",
        "training differs with torch.distributed.checkpoint though nothing was loaded",
        "loss differs between a run that saves at step 0 and one that does not",
    ),
    concerns="every model",
    breaks="the state of an optimizer that torch's distributed checkpoints were asked for before the first step is that of one that has taken a step: "
    "AdamW's first update is 1.34 times too small, Adam's moments hold weight decay, and ASGD takes no first step",
    retire_when="_init_optim_state leaves counters and moments as a first step finds them",
    brief="fresh optimizers in DCP",
    until="counters are reset",
    threads=(
        Thread(
            repository="pytorch/torchtitan", number=4382, state="merged, opened 2026-08-30, repairs torchtitan's copy"
        ),
    ),
    last_validated="2026-11-28, x86-64 without GPU: torch 2.11.0, 2.13.0 and 2.15.0; H200, driver 580.159.04: torch 2.11.0; 2.11.0 to 2.15.0 read",
)
