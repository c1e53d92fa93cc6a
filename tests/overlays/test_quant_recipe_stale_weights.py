"""Real Megatron modules with the overlay: layers that a recipe quantizes are told that a step begins.

The newest release tells them itself. Its method without recipes is what 0.16.0 to 0.18.2 have, which lanes of the spring and the summer run.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from releases import daily, newest

from megacpp_overlays.overlays.quant_recipe_stale_weights import OVERLAY, observe

pytestmark = pytest.mark.upstream

BROKEN = ("0.16.1", "0.18.2")
FIXED = newest()
STEPS = """
import importlib, json, sys
import megacpp_overlays
import torch
from types import SimpleNamespace
module = importlib.import_module("megatron.core.transformer.module")
class Layer(torch.nn.Module):
    is_first_microbatch = True
class Model(module.MegatronModule):
    def __init__(self, **quantized):
        super().__init__(SimpleNamespace(**{"fp8": None, "fp4": None, "quant_recipe": None, **quantized}))
        self.plain, self.layers = torch.nn.Identity(), torch.nn.ModuleList([Layer(), Layer()])
def told(**quantized):
    model, found = Model(**quantized), []
    for _ in range(2):
        for each in model.layers:
            each.is_first_microbatch = False
        model.set_is_first_microbatch()
        found.append([each.is_first_microbatch for each in model.layers])
    return found, hasattr(model.plain, "is_first_microbatch")
ways = {"recipe": {"quant_recipe": "a"}, "fp8": {"fp8": "e4m3"}, "both": {"quant_recipe": "a", "fp8": "e4m3"}, "none": {}}
facts = lambda: {name: told(**way) for name, way in ways.items()}
records = {each.overlay.id: each for each in megacpp_overlays.audit().records}
on = facts()
decision = records["quant-recipe-stale-weights"].decision.value
megacpp_overlays.undo()
sys.stdout.write(json.dumps({"decision": decision, "on": on, "off": facts()}))
"""
TOLD, UNTOLD = [[[True, True]] * 2, False], [[[False, False]] * 2, False]


@pytest.fixture(scope="module", params=daily(*BROKEN, FIXED, older=BROKEN[-1]))
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, megatron_says: Callable[..., Any]
) -> tuple[str, Any]:
    """A release, and what its layers are told with the overlay and without it."""
    script = tmp_path_factory.mktemp("script") / "steps.py"
    script.write_text(STEPS)
    return request.param, megatron_says(request.param, script)


def test_every_layer_is_told_where_anything_quantizes_and_none_elsewhere(measured: tuple[str, Any]) -> None:
    version, found = measured

    assert found["decision"] == ("active" if version in BROKEN else "retired")
    assert found["on"] == {"recipe": TOLD, "fp8": TOLD, "both": TOLD, "none": UNTOLD}


def test_upstream_tells_none_where_a_recipe_alone_quantizes(measured: tuple[str, Any]) -> None:
    version, found = measured

    assert found["off"] == {**found["on"], "recipe": UNTOLD if version in BROKEN else TOLD}


@pytest.mark.parametrize("conditions", [("fp8",), ("quant_recipe",), ("fp8", "quant_recipe", "timers")])
def test_a_method_that_tells_too_few_or_too_many_fails_the_self_test(conditions: tuple[str, ...]) -> None:
    def set_is_first_microbatch(self: Any) -> None:
        if "timers" in conditions or any(getattr(self.config, each) is not None for each in conditions):
            for each in self.modules():
                each.is_first_microbatch = True

    module: Any = SimpleNamespace(MegatronModule=SimpleNamespace(set_is_first_microbatch=set_is_first_microbatch))

    assert observe(module).broken
    assert OVERLAY.self_test is observe
