"""Real experts of Megatron with the overlay: projections that write a latent are initialised as inner ones, and no others change.

The cases and the neighbours of pack 33 run on releases, in a process of its own for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from placed_seams import assert_witness_and_self_test, placed, without_overlays
from releases import newest
from reproduced_pack import assert_neighbours_are_the_same, assert_repaired, measured_on

from megacpp_overlays.feature_probes.latent_moe_fc2_init import SCALED
from megacpp_overlays.model import Overlay
from megacpp_overlays.overlays.latent_moe_fc2_init import PARTS

pytestmark = pytest.mark.upstream

measured = measured_on("33", "0.17.1", "0.18.2", newest(), switched_on=True, daily=[newest()], neighbours=True)


def test_a_release_is_broken_without_the_overlay_and_right_with_it(measured: Any) -> None:
    assert_repaired(measured, parts=2)


def test_results_that_are_right_without_the_overlay_have_the_same_bits(measured: Any) -> None:
    assert_neighbours_are_the_same(measured)


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
    assert_witness_and_self_test(part, module, SCALED)


@pytest.mark.parametrize("setting", [("output_layer_init_method", "inner"), ("init_method", "output")])
def test_an_initialisation_of_all_second_projections_alike_fails_the_self_test(
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


def constructed(part: Overlay, module: ModuleType, latent: int | None, parts: Any, *more: Any, **named: Any) -> Any:
    """Return the arguments of upstream's constructor after the configuration."""
    seen: list[Any] = []
    (replacement,) = part.replacements[SCALED]
    constructor = replacement.make(lambda _, *args, **kwargs: seen.append((args, kwargs)), module)
    leading = () if part is PARTS[0] else (3,)

    constructor(None, *leading, SimpleNamespace(moe_latent_size=latent), parts, *more, **named)

    ((args, kwargs),) = seen
    assert args[: len(leading)] == leading
    return args[len(leading) + 1 :], kwargs


def test_an_expert_gets_every_other_argument_as_it_was_given(part: Overlay, module: ModuleType) -> None:
    """The seam passes unknown arguments on, by position or by name."""
    found = constructed(part, module, None, "parts", "more", name="name")

    assert found == (("parts", "more"), {"name": "name"})


def test_the_specification_of_experts_is_left_alone(part: Overlay, module: ModuleType) -> None:
    """One specification makes the experts of all layers."""
    parts = SimpleNamespace(linear_fc1="first", linear_fc2="second")

    (given, *_), _ = constructed(part, module, 4, parts, True)

    assert given.linear_fc1 == "first"
    assert given.linear_fc2 != "second"
    assert vars(parts) == {"linear_fc1": "first", "linear_fc2": "second"}
