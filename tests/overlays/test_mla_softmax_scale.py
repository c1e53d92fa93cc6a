"""Multi-latent attention with the overlay: logits are scaled by the configured `softmax_scale`.

Cases of pack 73 run real attentions. Further tests call the function that builds cores in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
from placed_seams import assert_self_test, placed, stock
from places import SUPPORT
from released_megatron import ALL_ON
from releases import newest
from reproduced_pack import assert_repaired

from megacpp_overlays.feature_probes.mla_softmax_scale import ABSORBED, ATTENTION, IGNORED, TARGET
from megacpp_overlays.overlays.mla_softmax_scale import OVERLAY

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore::UserWarning")]

OLDEST, NEWEST = "0.11.0", newest()
module = stock(TARGET.module)


@pytest.mark.parametrize("version", [pytest.param(OLDEST, marks=pytest.mark.full), NEWEST])
def test_a_release_is_right_with_it(megatron_says: Callable[..., Any], version: str) -> None:
    assert_repaired(megatron_says(version, SUPPORT / "reproduced.py", "73", **ALL_ON))


def test_the_self_test_sees_the_defect_and_its_absence(module: ModuleType) -> None:
    assert_self_test(OVERLAY, module, IGNORED)


class Latent:
    """An attention whose head has 16 channels."""

    def __init__(self, build: Callable[..., Any], config: Any, **more: Any) -> None:
        self.config, self.q_head_dim = config, 16
        self.softmax_scale = 0.5  # a quarter, and YaRN's factor of two
        self.core = build(dict, config=self.config, softmax_scale=self.softmax_scale, **more)


def made(build: Callable[..., Any], scale: float | None, name: str = ATTENTION, **more: Any) -> tuple[float, float]:
    """Return the scales of a core and its attention, whose constructor is in a module of that name."""
    attention = object.__new__(Latent)
    constructor = FunctionType(Latent.__init__.__code__, {"__name__": name})
    constructor(attention, build, SimpleNamespace(softmax_scale=scale), **{"k_channels": 16, **more})
    return attention.core["softmax_scale"], attention.softmax_scale


@pytest.mark.parametrize("name", [ATTENTION, ABSORBED])
def test_the_factor_of_yarn_stays(module: ModuleType, name: str) -> None:
    with placed(OVERLAY, IGNORED, module):
        assert made(module.build_module, 0.125, name) == (0.25, 0.25)
        assert made(module.build_module, None, name) == (0.5, 0.5)


def test_a_scale_of_zero_is_a_scale(module: ModuleType) -> None:
    with placed(OVERLAY, IGNORED, module):
        assert made(module.build_module, 0.0) == (0.0, 0.0)


def test_constructors_of_others_are_left_alone(module: ModuleType) -> None:
    with placed(OVERLAY, IGNORED, module):
        assert made(module.build_module, 0.125, "mine") == (0.5, 0.5)


def test_a_wrapper_may_stand_between(module: ModuleType) -> None:
    with placed(OVERLAY, IGNORED, module):
        assert made(lambda *args, **kwargs: module.build_module(*args, **kwargs), 0.125) == (0.25, 0.25)
