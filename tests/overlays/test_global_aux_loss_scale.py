"""Balancing over the global batch with the overlay: a router learns the same on any number of data parallel ranks.

Cases of pack 53 run on releases, in a process of its own for each; `global_balances.py` runs everything else on the newest one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from global_balances import FOLDER
from places import SUPPORT
from released_megatron import ALL_ON
from releases import newest
from reproduced_pack import assert_repaired, measured_on

from megacpp_overlays.loader.settings import DISABLE
from megacpp_overlays.repro import neighbour

pytestmark = pytest.mark.upstream

ROUNDING = 1e-6
measured = measured_on("53", "0.15.0", "0.16.1", "0.18.2", newest(), switched_on=True)


def test_a_release_is_broken_without_the_overlay_and_right_with_it(measured: Any) -> None:
    assert_repaired(measured)


# On the newest release


@pytest.fixture(scope="module")
def balances(megatron_says: Callable[..., Any]) -> Any:
    """Results with the overlay and without it. `masked-aux-loss-tokens` is off, because it repairs counts under a padding mask."""
    alone = {**ALL_ON, DISABLE: "masked-aux-loss-tokens"}
    return megatron_says(newest(), SUPPORT / "global_balances.py", **alone)


def test_the_newest_release_is_broken_without_the_overlay_and_right_with_it(balances: Any) -> None:
    assert balances["decisions"] == ["active"]
    assert all(balances["off"]["cases"])
    assert not any(balances["on"]["cases"])


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(balances: Any) -> None:
    assert balances["seen"]
    assert balances["sound"]


@pytest.mark.parametrize("name", [each.name for each in neighbour.load(FOLDER)])
def test_results_that_are_right_without_the_overlay_have_the_same_bits(name: str, balances: Any) -> None:
    without = balances["off"]["neighbours"][name]

    assert without
    assert balances["on"]["neighbours"][name] == without


def test_logged_values_are_the_same(balances: Any) -> None:
    on, off = (balances[way]["two microbatches"]["0"][0] for way in ("on", "off"))
    logged = {name: each for name, each in off.items() if not name.endswith("gradient")}

    assert len(logged) == 2
    assert {name: on[name] for name in logged} == logged


@pytest.mark.parametrize("padding", ["0", "3"])
def test_two_microbatches_have_the_gradient_of_one_rank(balances: Any, padding: str) -> None:
    """Counts are averaged over the microbatches so far, and padding counts on no rank."""
    found, alone = (each["rank 0, gradient"] for each in balances["on"]["two microbatches"][padding])

    assert found == pytest.approx(alone, rel=1e-4, abs=ROUNDING)


def test_a_padding_mask_and_a_loss_for_each_token_together_are_left_to_upstream(balances: Any) -> None:
    asked = "padded, for each token"

    assert balances["on"][asked] == balances["off"][asked]


def test_a_loss_of_another_kind_adds_its_own_gradient(balances: Any) -> None:
    kinds = balances["on"]["kinds"]
    both, one, other = (kinds[name]["rank 0, gradient"] for name in ("both", "of a microbatch", "of the batch"))

    assert both == pytest.approx([sum(each) for each in zip(one, other, strict=True)], rel=1e-4, abs=ROUNDING)
