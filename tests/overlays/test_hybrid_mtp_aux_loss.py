"""Real routers of multi-token prediction: with the overlays, a layer that serves several predictions counts its losses once.

Both overlays of the pack are tested. `repeated_routers.py` measures them, in a process of its own for each release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from placed_seams import assert_witness_and_self_test, overlays_out, placed
from places import SUPPORT
from releases import daily, newest
from repeated_routers import IDS, LAYERS
from upstream_imports import upstream_module

from megacpp_overlays.loader import live_names, seams
from megacpp_overlays.model import Replacement
from megacpp_overlays.overlays import hybrid_mtp_aux_loss, mtp_z_loss

pytestmark = pytest.mark.upstream

WITHOUT_STACK, OLDER, NEWEST = "0.17.1", "0.18.2", newest()
OVERLAYS = (hybrid_mtp_aux_loss.OVERLAY, mtp_z_loss.OVERLAY)
ROUNDING = 1e-5


@pytest.fixture(scope="module", params=daily(WITHOUT_STACK, OLDER, NEWEST))
def measured(request: pytest.FixtureRequest, megatron_says: Callable[..., Any]) -> tuple[str, Any]:
    """A release, and its measurements with the overlays and without them."""
    return request.param, megatron_says(request.param, SUPPORT / "repeated_routers.py")


def ways(found: Any) -> dict[str, Any]:
    return {name: each for name, each in found.items() if name != "second place"}


def close(one: list[float], other: list[float], *, times: float = 1.0) -> bool:
    return torch.allclose(torch.tensor(one), times * torch.tensor(other), rtol=ROUNDING, atol=ROUNDING)


def logged_layer(logged: list[float]) -> int:
    (found,) = [number for number, each in enumerate(logged) if each]
    return found


def test_upstream_counts_losses_once_for_each_prediction(measured: tuple[str, Any]) -> None:
    version, found = measured

    assert len(ways(found["off"])) == (2 if version == WITHOUT_STACK else 4)
    for name, way in ways(found["off"]).items():
        times = 1 if name == "marked, balance" else 2
        assert close(way["twice"]["gradient"], way["once"]["gradient"], times=times), name
        assert logged_layer(way["once"]["logged"]) == (0 if name.startswith("stacked") else LAYERS), name


def test_with_the_overlays_they_count_once_and_are_logged_for_the_prediction(measured: tuple[str, Any]) -> None:
    version, found = measured

    stack = "absent" if version == WITHOUT_STACK else "active"
    assert found["decisions"] == dict(zip(IDS, (stack, "active"), strict=True))
    for name, way in ways(found["on"]).items():
        for several, once in (("twice", "once"), ("thrice, over tokens", "once, over tokens")):
            assert close(way[several]["gradient"], way[once]["gradient"]), name
            assert logged_layer(way[several]["logged"]) == LAYERS, name
            assert sum(way[several]["logged"]) == pytest.approx(sum(way[once]["logged"])), name


def test_losses_that_upstream_counts_once_are_the_same_bits(measured: tuple[str, Any]) -> None:
    _, found = measured

    for name, way in ways(found["on"]).items():
        alone = found["off"][name]
        assert way["decoder"] == alone["decoder"]
        assert way["a layer each"]["gradient"] == alone["a layer each"]["gradient"]
        assert logged_layer(way["a layer each"]["logged"]) == LAYERS
        if name.startswith("marked"):
            assert way["a layer each"] == alone["a layer each"]
            assert close(way["twice"]["logged"], alone["twice"]["logged"])


def test_a_layer_beyond_the_number_of_predictions_is_logged_as_the_last(measured: tuple[str, Any]) -> None:
    version, found = measured

    if version != WITHOUT_STACK:
        logged = found["on"]["second place"]["logged"]
        assert logged_layer(logged) == LAYERS
        assert sum(logged) == pytest.approx(sum(found["off"]["second place"]["logged"]))


# In this process


@pytest.fixture(params=OVERLAYS, ids=[each.id for each in OVERLAYS])
def overlay(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def upstream() -> Iterator[None]:
    """Upstream as it is, without any overlay."""
    for each in OVERLAYS:
        imported(each)
    with overlays_out():
        yield


def imported(overlay: Any) -> tuple[ModuleType, Replacement]:
    module = upstream_module(overlay.target.module)
    ((replacement,),) = overlay.replacements.values()
    return module, replacement


@pytest.mark.usefixtures("upstream")
def test_the_witness_sees_the_defect_and_the_self_test_its_absence(overlay: Any) -> None:
    module, _ = imported(overlay)

    assert_witness_and_self_test(overlay, module, *overlay.replacements)
    (shape,) = overlay.replacements
    with placed(overlay, shape, module):
        assert not overlay.witness(module).broken


@pytest.mark.usefixtures("upstream")
def test_a_stack_that_marks_the_decoder_too_fails_the_self_test() -> None:
    module, replacement = imported(OVERLAYS[0])
    owner, name = live_names.resolve(module, replacement.symbol)

    def marks_all(original: Any) -> Any:
        def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            for each in self.layers:
                each.is_mtp_layer = True

        return constructor

    seam = seams.replace(owner, name, marks_all, overlay_id="marks-all")
    try:
        assert OVERLAYS[0].self_test(module).broken
    finally:
        seam.undo()


def test_a_layer_of_another_kind_and_one_without_a_number_of_predictions_are_left_alone() -> None:
    _, replacement = imported(OVERLAYS[0])
    made = {kind: torch.nn.Identity() for kind in "EM"}
    for each in made.values():
        each.is_mtp_layer, each.layer_number = False, 7
        each.attach_and_log_load_balancing_loss = None

    def upstream(self: Any) -> None:
        self.layer_type_list, self.layers = list(made), list(made.values())
        self.is_mtp_layer, self.config = True, SimpleNamespace(mtp_num_layers=None)

    replacement.make(upstream, SimpleNamespace(LayerSymbols=SimpleNamespace(MOE="E")))(SimpleNamespace())

    assert {kind: (each.is_mtp_layer, each.layer_number) for kind, each in made.items()} == {
        "E": (True, 7),
        "M": (False, 7),
    }
