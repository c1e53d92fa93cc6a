"""Torch FSDP2 with the overlay: gradients of losses that are sums of tokens are divided by the tokens of the global batch.

The case of pack 68 runs on releases, each in a process of its own. Further tests call the wrappers in this process.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from placed_seams import assert_self_test, placed, stock
from releases import newest
from reproduced_pack import assert_repaired, measured_on

from megacpp_overlays.feature_probes.fsdp2_per_token_loss import TARGET, UNSCALED, WRAPPER
from megacpp_overlays.overlays.fsdp2_per_token_loss import OVERLAY

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore::UserWarning")]

NEWEST = newest()
measured = measured_on("68", "0.15.3", NEWEST, daily=[NEWEST])
module = stock(TARGET.module)


def test_a_release_is_broken_without_the_overlay_and_right_with_it(measured: Any) -> None:
    assert_repaired(measured)


def test_the_self_test_sees_the_defect_and_its_absence(module: ModuleType) -> None:
    assert_self_test(OVERLAY, module, UNSCALED)


@pytest.fixture
def wrapper(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of wrappers, with the seam; nothing is sharded."""
    monkeypatch.setattr(module, "DeviceMesh", SimpleNamespace(from_group=lambda *_: None))
    monkeypatch.setattr(module, "fully_shard", lambda each, **_: each)
    with placed(OVERLAY, UNSCALED, module):
        yield getattr(module, WRAPPER)


def scaled(wrapper: type[Any], *gradients: float | None, ranks: int = 2, factor: Any = 0.25) -> list[float | None]:
    """Return gradients of layers after their wrapper has scaled them."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in gradients))
    config = SimpleNamespace(transformer_impl="none", recompute_granularity=None)
    group = SimpleNamespace(size=lambda: ranks)
    model = wrapper(config, SimpleNamespace(), layers, sub_modules_to_wrap=set(), process_group=group)
    for layer, each in zip(layers, gradients, strict=True):
        layer.weight.grad = None if each is None else torch.full((1, 1), each)
    model.scale_gradients(factor)
    return [None if each.weight.grad is None else float(each.weight.grad) for each in layers]


def test_layers_without_a_gradient_stay_so(wrapper: Any) -> None:
    assert scaled(wrapper, 8.0, None, factor=torch.tensor(0.25)) == [4.0, None]


def test_a_class_of_a_user_scales_as_the_one_that_it_is_derived_from(wrapper: Any) -> None:
    assert scaled(type("Own", (wrapper,), {}), 8.0, ranks=4) == [8.0]


def test_a_class_that_scales_gradients_itself_goes_on_doing_so(wrapper: Any) -> None:
    assert scaled(type("Own", (wrapper,), {"scale_gradients": lambda *_: None}), 8.0) == [8.0]
