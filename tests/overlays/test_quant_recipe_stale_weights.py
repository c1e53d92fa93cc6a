"""Real Megatron modules with the overlay: layers that a recipe quantizes get the flag that a step begins.

The case and the neighbours of pack 36 run on releases, in a process of its own for each. The newest release tells layers itself.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from reproduced_pack import assert_neighbours_are_the_same, assert_repaired, measured_on

from megacpp_overlays.overlays.quant_recipe_stale_weights import OVERLAY, observe

pytestmark = pytest.mark.upstream

measured = measured_on("36", "0.16.1", "0.18.2", daily=["0.18.2"], neighbours=True)


def test_a_release_is_broken_without_the_overlay_and_right_with_it(measured: Any) -> None:
    assert_repaired(measured)


def test_results_that_are_right_without_the_overlay_have_the_same_bits(measured: Any) -> None:
    assert_neighbours_are_the_same(measured)


def test_a_module_without_the_flag_gets_none() -> None:
    ((replacement,),) = OVERLAY.replacements.values()
    plain, layer = SimpleNamespace(), SimpleNamespace(is_first_microbatch=False)
    model = SimpleNamespace(config=SimpleNamespace(quant_recipe="a"), modules=lambda: iter([plain, layer]))

    replacement.make(lambda _: None, ModuleType("any"))(model)

    assert layer.is_first_microbatch
    assert vars(plain) == {}


@pytest.mark.parametrize("conditions", [("fp8",), ("quant_recipe",), ("fp8", "quant_recipe", "timers")])
def test_a_method_that_tells_too_few_or_too_many_fails_the_self_test(conditions: tuple[str, ...]) -> None:
    def set_is_first_microbatch(self: Any) -> None:
        if "timers" in conditions or any(getattr(self.config, each) is not None for each in conditions):
            for each in self.modules():
                each.is_first_microbatch = True

    module: Any = SimpleNamespace(MegatronModule=SimpleNamespace(set_is_first_microbatch=set_is_first_microbatch))

    assert observe(module).broken
    assert OVERLAY.self_test is observe
