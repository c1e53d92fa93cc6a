"""Initialization of an optimizer's state by Megatron-FSDP without an update.

`fully_shard_optimizer` gives each parameter a gradient of zero and lets the optimizer step once, so that there is state for a
checkpoint to be loaded into. That step decays weights, and it counts: Adam's first real update is corrected for the bias of a second
one, which with its usual betas makes it 1.34 times too small. Where decay is coupled, the moments already contain it.

Upstream's function runs unchanged, but the optimizer has a replaced step: the original step without learning rate and decay, which
then restores the settings of parameter groups and resets the counters. That is upstream's repair on main, with two additions.
State that existed before gets its values back, where upstream's repair removes its counter. State that NAdam, ASGD and Rprop of
torch derive from the number of steps or from the learning rate is reset too; otherwise ASGD's first update would be zero.

Source: https://github.com/NVIDIA/Megatron-LM/issues/5974, https://github.com/NVIDIA/Megatron-LM/pull/5976
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import fsdp_optimizer_under_update as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread

_STEP = "step"
_UPDATES = ("lr", "weight_decay")
"""Settings by which a step with zero gradients changes weights."""
_AT_FIRST: Mapping[str, Mapping[str, float | str]] = {
    "NAdam": {"mu_product": 1.0},
    "ASGD": {"eta": "lr"},
    "Rprop": {"step_size": "lr"},
}
"""State of torch's optimizers, other than counters, that does not begin with zero: its first value, or the setting that has it."""


def _make(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def fully_shard_optimizer(optimizer: Any, preproc_state_dict_for_dcp_ckpt: bool = True, **more: Any) -> Any:
        own = vars(optimizer).get(_STEP)  # a scheduler of learning rates puts one there
        theirs = optimizer.step

        def build_state() -> None:
            with module.torch.no_grad():
                _step_without_update(theirs, optimizer, module.torch)

        optimizer.step = build_state
        try:
            return original(optimizer, preproc_state_dict_for_dcp_ckpt, **more)
        finally:
            if vars(optimizer).get(_STEP) is build_state:  # upstream raised before it put its own there
                del optimizer.step
                if own is not None:
                    optimizer.step = own

    return fully_shard_optimizer


def _step_without_update(step: Callable[[], Any], optimizer: Any, torch: Any) -> None:
    """Take a step that builds state, and restore everything else to its values before the first step.

    Args:
        step: the optimizer's step.
        optimizer: has groups of parameters with settings, and state by parameter. Its gradients are zero.
        torch: the `torch` of the target.
    """
    groups = [(group, _values(group)) for group in optimizer.param_groups]
    states = {param: _values(state) for param, state in optimizer.state.items()}
    for group, _ in groups:
        for key in {*_UPDATES} & {*group}:
            # An optimizer in a CUDA graph needs a tensor. The caller's own is put back: a scheduler may hold it.
            is_tensor = isinstance(group[key], torch.Tensor)
            group[key] = torch.zeros_like(group[key]) if is_tensor else 0.0
    try:
        step()
    finally:
        for group, before in groups:
            _put_back(group, before)
    for group, before in groups:
        at_first = {_STEP: 0.0, **_begins_with(optimizer, group, torch)}
        _begin(group, before, at_first)
        for param in group["params"]:
            state, before = optimizer.state.get(param, {}), states.get(param, {})
            _put_back(state, before)
            _begin(state, before, at_first)


def _values(mapping: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return settings or state by name: each object, and a copy of its present value."""
    return {
        key: (each, each.clone() if hasattr(each, "clone") else each)
        for key, each in mapping.items()
        if key != "params"
    }


def _put_back(mapping: dict[str, Any], before: Mapping[str, tuple[Any, Any]]) -> None:
    for key, (each, value) in before.items():
        mapping[key] = each.copy_(value) if hasattr(each, "copy_") else value


def _begin(mapping: dict[str, Any], before: Mapping[str, Any], at_first: Mapping[str, float]) -> None:
    """Set new entries to their first values."""
    for key in ({*at_first} & {*mapping}) - {*before}:
        each, value = mapping[key], at_first[key]
        mapping[key] = each.fill_(value) if hasattr(each, "fill_") else type(each)(value)


def _begins_with(optimizer: Any, group: Mapping[str, Any], torch: Any) -> dict[str, float]:
    begins: dict[str, float] = {}
    for kind, state in _AT_FIRST.items():
        if isinstance(optimizer, getattr(torch.optim, kind)):
            begins |= {key: float(group[value] if isinstance(value, str) else value) for key, value in state.items()}
    return begins


_WEIGHT, _RATE, _DECAY = 2.0, 0.5, 0.25


def observe(module: ModuleType) -> Observation:
    """Prepare an optimizer of one weight on the CPU that decays, counts steps and sums gradients, and take a step with it."""
    import torch

    with torch.inference_mode(False), torch.no_grad():
        weight = torch.full((1,), _WEIGHT, dtype=torch.float32, device="cpu")
        installed: list[float] = []
        weight._megatron_fsdp_model = SimpleNamespace(  # noqa: SLF001 - where upstream looks for it
            model_auto_sync=True, install_optimized_model_weights=lambda: installed.append(weight.item())
        )
        optimizer = _DecayOptimizer(weight)
        module.fully_shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt=False)
        prepared = optimizer.numbers()
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        stepped = optimizer.numbers()
    right = prepared == [_WEIGHT, 0.0, 0.0, 0.0, _RATE, _DECAY] and weight.grad is not None
    decayed = _WEIGHT * (1 - _RATE * _DECAY)
    right &= stepped == [decayed, 1.0, 1.0, _WEIGHT * _DECAY, _RATE, _DECAY] and installed == [decayed]
    return Observation(
        broken=not right,
        seen=f"a weight of {_WEIGHT} is {prepared[0]} before the first step, and an optimizer that took none counted {prepared[2]:.0f}",
    )


class _DecayOptimizer:
    """Minimal optimizer for Megatron-FSDP with one group and one parameter, and both coupled and decoupled decay."""

    def __init__(self, weight: Any) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": [weight], "lr": _RATE, "weight_decay": _DECAY}]
        self.state: dict[Any, dict[str, Any]] = {}

    def step(self) -> None:
        (group,) = self.param_groups
        (weight,) = group["params"]
        state = self.state.setdefault(weight, {"step": weight.new_zeros(()), "sum": weight.new_zeros(1)})
        group["step"] = group.get("step", 0) + 1
        state["step"] += 1
        state["sum"] += weight.grad + group["weight_decay"] * weight
        weight *= 1 - group["lr"] * group["weight_decay"]

    def zero_grad(self) -> None:
        for weight in self.param_groups[0]["params"]:
            weight.grad = None

    def numbers(self) -> list[float]:
        """Return the weight, both counters, the sum, and the settings."""
        (group,) = self.param_groups
        (weight,) = group["params"]
        state = self.state.get(weight, {})
        counted = [each.get("step", math.nan) for each in (group, state)]
        return [
            float(each) for each in (weight, *counted, state.get("sum", math.nan), group["lr"], group["weight_decay"])
        ]


OVERLAY = Overlay(
    id="fsdp-optimizer-under-update",
    pack=31,
    title="build the state of a Megatron-FSDP optimizer without an update",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.COUNTED: (Replacement(symbol=feature.FUNCTION, make=_make),)},
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "first steps of Megatron-FSDP differ from DDP",
        "weights change before the first step with FSDP",
        "learning is too slow in the first FSDP steps",
    ),
    concerns="megatron_fsdp",
    breaks="weights decay once before the first step of a Megatron-FSDP optimizer, and its first updates are corrected for the bias of "
    "later ones: Adam's first is 1.34 times too small",
    retire_when="fully_shard_optimizer takes a step without learning rate and decay, and does not count it",
    brief="first FSDP optimizer steps",
    until="Megatron-FSDP counts no step",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=5974, state="closed by 5976"),
        Thread(repository="NVIDIA/Megatron-LM", number=5976, state="merged 2026-07-30, in no release"),
        Thread(repository="NVIDIA-NeMo/Automodel", number=3191, state="open: uses a fork until there is a release"),
    ),
    last_validated="2026-11-23, x86-64 without GPU, torch 2.11.0: megatron-core 0.17.1, 0.18.2 and 0.19.2 and dev d48bd6be0a; 0.14.0 to "
    "0.19.2 and main d98e8a64dd read",
)
