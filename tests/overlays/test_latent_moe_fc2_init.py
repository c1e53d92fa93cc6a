"""Real experts of Megatron with the overlay: what writes a latent begins as inner projections do, and nothing else is changed.

What is measured is in `latent_experts.py`, in a process of its own for each release.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from latent_experts import LATENT, LAYERS
from placed_seams import placed, without_overlays
from places import SUPPORT
from released_megatron import ALL_ON
from releases import daily, newest

from megacpp_overlays.feature_probes.latent_moe_fc2_init import SCALED
from megacpp_overlays.model import Overlay
from megacpp_overlays.overlays.latent_moe_fc2_init import PARTS

pytestmark = pytest.mark.upstream

OLDEST, OLDER, NEWEST = "0.17.1", "0.18.2", newest()
ROOT = math.sqrt(2 * LAYERS)
"""What the deviation of output layers is divided by."""


@pytest.fixture(scope="module", params=daily(OLDEST, OLDER, NEWEST))
def measured(request: pytest.FixtureRequest, megatron_says: Callable[..., Any]) -> Any:
    """How experts of a release begin, with the overlay and without it."""
    return megatron_says(request.param, SUPPORT / "latent_experts.py", **ALL_ON)


def test_it_is_off_unless_it_is_asked_for() -> None:
    assert all(part.opt_in for part in PARTS)


@pytest.mark.parametrize("kind", ["sequential", "grouped"])
def test_what_writes_a_latent_begins_as_much_larger_as_it_was_scaled_down(measured: Any, kind: str) -> None:
    assert measured["decisions"] == ["active", "active"]
    on, off = (measured[which][f"{kind}, {LATENT}"]["weights"] for which in ("on", "off"))
    assert on.keys() == off.keys()
    for name, weight in on.items():
        if "fc2" in name:  # the same random numbers
            assert torch.allclose(torch.tensor(weight), ROOT * torch.tensor(off[name]), rtol=1e-5, atol=0)
        else:
            assert weight == off[name]
    assert sum("fc2" in name for name in on) == 2


@pytest.mark.parametrize("kind", ["sequential", "grouped"])
def test_what_writes_hidden_states_begins_as_it_does(measured: Any, kind: str) -> None:
    assert measured["on"][f"{kind}, None"] == measured["off"][f"{kind}, None"]


def test_what_experts_are_made_of_is_left_alone(measured: Any) -> None:
    """One specification makes the experts of all layers."""
    assert all(each["left alone"] for each in measured["on"].values())


# In this process


@pytest.fixture(scope="module", params=PARTS, ids=["single", "grouped"])
def part(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def module(part: Overlay) -> Iterator[ModuleType]:
    """The newest release, without any overlay."""
    with without_overlays(part.target.module) as found:
        yield found


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(part: Overlay, module: ModuleType) -> None:
    assert part.witness is not None
    assert part.witness(module).broken
    with placed(part, SCALED, module):
        assert not part.self_test(module).broken
        with torch.inference_mode():
            assert not part.self_test(module).broken
    assert part.self_test(module).broken


@pytest.mark.parametrize("setting", [("output_layer_init_method", "inner"), ("init_method", "output")])
def test_what_begins_all_second_projections_alike_fails_the_self_test(
    part: Overlay, module: ModuleType, monkeypatch: pytest.MonkeyPatch, setting: tuple[str, str]
) -> None:
    owner = getattr(module, part.target.symbol.partition(".")[0])
    with placed(part, SCALED, module):
        right = owner.__init__

        def spoilt(self: Any, *args: Any, **kwargs: Any) -> None:
            (config,) = (each for each in args if hasattr(each, "moe_latent_size"))
            vars(config)[setting[0]] = setting[1]
            right(self, *args, **kwargs)

        monkeypatch.setattr(owner, "__init__", spoilt)
        assert part.self_test(module).broken
        monkeypatch.undo()


def test_an_expert_gets_every_other_argument_as_it_was_given(part: Overlay, module: ModuleType) -> None:
    """The seam passes what it does not know on, in place or by name."""
    seen: list[Any] = []
    (replacement,) = part.replacements[SCALED]
    constructor = replacement.make(lambda _, *args, **kwargs: seen.append((args, kwargs)), module)
    config = type("Config", (), {"moe_latent_size": None})()
    leading = () if part is PARTS[0] else (3,)

    constructor(None, *leading, config, "parts", "more", name="name")

    assert seen == [((*leading, config, "parts", "more"), {"name": "name"})]
