"""Layers that are told right without the overlay that a step begins: without a recipe they are not told, with FP8 they are, and so is every
layer that an override of the model's tells."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Neighbour, TargetAbsent, beside

PACK = beside(__file__)


def _stepped(*, overridden: bool = False, **settings: Any) -> Mapping[str, object]:
    """Return what two steps of two microbatches compute, and what is learnt of their states.

    Args:
        overridden: whether the model tells its layers itself after its base did.
        settings: of the configuration.
    """
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not hasattr(importlib.import_module(PACK.ENGINE), "TEQuantizationParams"):
        raise TargetAbsent("no recipe says what Transformer Engine quantizes")
    schedules = importlib.import_module(PACK.SCHEDULES)
    config = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1, use_cpu_initialization=True)
    for name, value in settings.items():
        setattr(config, name, value)
    model = _model(config, overridden=overridden)
    outputs, learnt = list[float](), list[float]()
    for _ in range(PACK.STEPS):
        for number in range(PACK.MICROBATCHES):
            states = torch.tensor(3.0, requires_grad=True)
            step: Any = (_forward(states), None, model, PACK.MICROBATCHES, None, [], config, 1)
            found, _tokens = schedules.forward_step(*step, is_first_microbatch=number == 0, is_last_stage=False)
            output = found[0] if isinstance(found, list) else found
            output.backward()
            outputs.append(float(output))
            learnt.append(float(states.grad))
        with torch.no_grad():
            for each in (model.layer, model.other):
                each.weight *= 2
    return {"outputs": outputs, "gradients of states": learnt}


def _model(config: Any, *, overridden: bool) -> Any:
    """Return a model of two layers that keep a copy of their weight until they are told that a step begins."""
    import torch

    class Layer(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(1.5))
            self.is_first_microbatch = True

        def forward(self, states: Any) -> Any:
            if self.is_first_microbatch:
                self.copy = self.weight.detach().clone()
            self.is_first_microbatch = False
            return states * self.copy

    class Model(importlib.import_module(PACK.MODULE).MegatronModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(config)
            self.layer, self.other, self.plain = Layer(), Layer(), torch.nn.Identity()
            self.set_input_tensor = lambda _: None

        def set_is_first_microbatch(self) -> None:
            super().set_is_first_microbatch()
            if overridden:
                self.layer.is_first_microbatch = True

        def forward(self, states: Any) -> Any:
            return self.plain(self.other(self.layer(states)))

    return Model()


def _forward(states: Any) -> Any:
    def forward(_data: Any, model: Any) -> Any:
        return model(states), None

    return forward


def _neighbour(name: str, **asked: Any) -> Neighbour:
    run = functools.partial(_stepped, **asked)
    return Neighbour(name=name, overlay="quant-recipe-stale-weights", run=run)


NEIGHBOURS = (
    _neighbour("no-recipe", quant_recipe=None),
    _neighbour("fp8", fp8="hybrid"),
    _neighbour("fp8-and-recipe", fp8="hybrid", quant_recipe=SimpleNamespace()),
    _neighbour("told-by-a-subclass", overridden=True),
)
