"""Megatron's schedule with a recipe for quantization: is a layer told that a step begins?

The real `forward_step` runs a real `MegatronModule` over two steps of two microbatches. Its layer keeps a copy of its weight, as Transformer
Engine's keep a quantized one: it makes a new copy when `is_first_microbatch` says so, and takes the flag back. Between the steps
the weight is doubled, and so are to be what the second step computes.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent

MODULE = "megatron.core.transformer.module"
SCHEDULES = "megatron.core.pipeline_parallel.schedules"
ENGINE = "megatron.core.extensions.transformer_engine"
STEPS, MICROBATCHES = 2, 2


def _run() -> Behaviour:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not hasattr(importlib.import_module(ENGINE), "TEQuantizationParams"):
        raise TargetAbsent("no recipe says what Transformer Engine quantizes")

    class Layer(torch.nn.Module):  # type: ignore[misc]
        """Computes with a copy of its weight, which it makes anew when a step begins."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))
            self.is_first_microbatch = True
            self.copy = None

        def forward(self, states: Any) -> Any:
            if self.is_first_microbatch:
                self.copy = self.weight.detach().clone()
            self.is_first_microbatch = False
            return states * self.copy

    class Model(importlib.import_module(MODULE).MegatronModule):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layer = Layer()
            self.set_input_tensor = lambda _: None

        def forward(self, states: Any) -> Any:
            return self.layer(states)

    config = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1, use_cpu_initialization=True)
    config.quant_recipe = SimpleNamespace()
    schedules, model = importlib.import_module(SCHEDULES), Model(config)
    found: list[float] = []
    for _ in range(STEPS):
        for number in range(MICROBATCHES):
            step: Any = (_forward, None, model, MICROBATCHES, None, [], config, 1)
            output, _ = schedules.forward_step(*step, is_first_microbatch=number == 0, is_last_stage=False)
            found.append(float(output[0] if isinstance(output, list) else output))
        with torch.no_grad():
            model.layer.weight *= 2
    expected = [2.0**step for step in range(STEPS) for _ in range(MICROBATCHES)]
    return Behaviour(broken=found != expected, seen=f"two steps of two microbatches compute with {found}, and weights were {expected}")


def _forward(_data: Any, model: Any) -> Any:
    import torch

    return model(torch.ones(())), None


CASES = (
    Case(
        name="steps-cpu",
        overlay="quant-recipe-stale-weights",
        device="cpu",
        versions=("torch",),
        run=_run,
        targets=(MODULE,),
    ),
)
