"""Balancing over the global batch with the overlay: a router learns the same on any number of data parallel ranks.

Cases of pack 53 run on releases, in a process of its own for each; everything else runs on the newest one in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from placed_seams import overlays_out, placed
from places import ROOT
from releases import newest
from reproduced_pack import assert_repaired, measured_on
from upstream_imports import upstream_module

from megacpp_overlays.feature_probes.global_aux_loss_scale import DIVIDED, TARGET
from megacpp_overlays.overlays.global_aux_loss_scale import OVERLAY
from megacpp_overlays.repro import beside, neighbour

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*tp_group is None")]

FOLDER = ROOT / "packs/53-global-aux-loss-scale"
PACK = beside(str(FOLDER / "neighbours.py"))
ROUNDING = 1e-6
measured = measured_on("53", "0.15.0", "0.16.1", "0.18.2", newest(), switched_on=True)


def test_a_release_is_broken_without_the_overlay_and_right_with_it(measured: Any) -> None:
    assert_repaired(measured)


# In this process


@pytest.fixture(scope="module")
def router() -> Iterator[ModuleType]:
    """The module of the newest release, without any overlay."""
    found = upstream_module(TARGET.module)
    PACK.prepare()
    with overlays_out():
        yield found


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(router: ModuleType) -> None:
    assert OVERLAY.witness(router).broken
    with placed(OVERLAY, DIVIDED, router):
        assert not OVERLAY.self_test(router).broken
    assert OVERLAY.witness(router).broken


def test_the_newest_release_is_broken_without_the_overlay_and_right_with_it(router: ModuleType) -> None:
    assert all(case.run().broken for case in PACK.CASES)
    with placed(OVERLAY, DIVIDED, router):
        assert not any(case.run().broken for case in PACK.CASES)


@pytest.mark.parametrize("each", neighbour.load(FOLDER), ids=lambda each: each.name)
def test_what_is_right_without_the_overlay_has_the_same_bits(each: neighbour.Neighbour, router: ModuleType) -> None:
    without = neighbour.measured(each)
    with placed(OVERLAY, DIVIDED, router):
        assert neighbour.problem(each, without, neighbour.measured(each)) is None


def logged(found: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: each for name, each in found.items() if not name.endswith("gradient")}


def test_what_is_logged_is_the_same(router: ModuleType) -> None:
    without = PACK.learnt(2, steps=2)
    with placed(OVERLAY, DIVIDED, router):
        found = PACK.learnt(2, steps=2)

    assert len(logged(found)) == 2
    assert logged(found) == logged(without)


@pytest.mark.parametrize("padding", [0, 3])
def test_two_microbatches_teach_what_they_teach_one_rank(router: ModuleType, padding: int) -> None:
    """Counts are averaged over the microbatches until then, and padding counts on no rank."""
    with placed(OVERLAY, DIVIDED, router):
        found, alone = (PACK.learnt(ranks, padding=padding, steps=2)["rank 0, gradient"] for ranks in (2, 1))

    assert found == pytest.approx(alone, rel=1e-4, abs=ROUNDING)


def test_a_padding_mask_and_a_loss_for_each_token_together_are_left_to_upstream(router: ModuleType) -> None:
    asked = {"ranks": 2, "padding": 3, "calculate_per_token_loss": True}
    without = PACK.learnt(**asked)
    with placed(OVERLAY, DIVIDED, router):
        assert PACK.learnt(**asked) == without


def test_losses_of_other_kinds_beside_it_are_what_they_were(router: ModuleType) -> None:
    """With both kinds the gradient is the sum of what each has alone."""
    kinds: list[Any] = [["aux_loss", "global_aux_loss"], ["aux_loss"], ["global_aux_loss"]]
    with placed(OVERLAY, DIVIDED, router):
        both, one, other = (
            PACK.learnt(2, moe_router_load_balancing_type=each, moe_aux_loss_coeff=[0.5] * len(each))[
                "rank 0, gradient"
            ]
            for each in kinds
        )

    assert both == pytest.approx([sum(each) for each in zip(one, other, strict=True)], rel=1e-4, abs=ROUNDING)
