"""Resumed expert ranks with the overlay: each draws the same numbers as in a run without an interruption.

Cases of pack 52 run on releases, in a process of its own for each; everything else runs on the newest one, in ranks that are forked from this process.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from placed_seams import assert_same_bits, placed, stock
from places import ROOT
from releases import newest
from reproduced_pack import assert_repaired, measured_on

from megacpp_overlays.feature_probes.expert_rng_resume import REPLICAS, TARGET
from megacpp_overlays.overlays.expert_rng_resume import KEY, OVERLAY, observe
from megacpp_overlays.repro import beside, neighbour

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore")]

FOLDER = ROOT / "packs/52-expert-rng-resume"
PACK = beside(str(FOLDER / "neighbours.py"))
ORDINARY = {"seeds-of-data-parallel-ranks", "other-streams"}


measured = measured_on("52", "0.18.2", newest())


def test_a_release_is_broken_without_the_overlay_and_right_with_it(measured: Any) -> None:
    assert_repaired(measured)


# In this process


module = stock(TARGET.module)


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(module: ModuleType) -> None:
    before = dict(vars(module))

    assert observe(module).broken
    with placed(OVERLAY, REPLICAS, module):
        assert not observe(module).broken
    assert vars(module) == before


@pytest.mark.parametrize(
    "each",
    [
        pytest.param(each, id=each.name, marks=() if each.name in ORDINARY else pytest.mark.full)
        for each in neighbour.load(FOLDER)
    ],
)
def test_results_that_are_right_without_the_overlay_have_the_same_bits(
    each: neighbour.Neighbour, module: ModuleType
) -> None:
    assert_same_bits(each, OVERLAY, module, REPLICAS)


def drawn(found: dict[str, list[float]], when: str) -> list[float]:
    """Return the number that each rank draws from its stream of experts."""
    return [found[f"rank {rank}, {when}, {PACK.EXPERT}"][0] for rank in range(2)]


def test_a_checkpoint_of_upstream_leaves_ranks_streams_that_differ(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = PACK.resumed(PACK.EXPERTS)
    with placed(OVERLAY, REPLICAS, module):
        real = module.save_checkpoint

        def without_streams(*args: Any, **kwargs: Any) -> None:
            ours, module.get_rng_state = module.get_rng_state, module.get_rng_state.__wrapped__
            try:
                real(*args, **kwargs)
            finally:
                module.get_rng_state = ours

        monkeypatch.setattr(module, "save_checkpoint", without_streams)
        found = PACK.resumed(PACK.EXPERTS)

    first, second = drawn(found, "resumed")
    assert first == drawn(stock, "resumed")[0] == drawn(found, "on")[0]
    assert second not in {first, *drawn(stock, "resumed")}


def test_a_checkpoint_of_fewer_expert_ranks_leaves_the_others_their_own_streams(module: ModuleType) -> None:
    with placed(OVERLAY, REPLICAS, module):
        found = PACK.resumed({}, later=PACK.EXPERTS)

    first, second = drawn(found, "resumed")
    assert first == drawn(found, "on")[0]
    assert second not in drawn(found, "on")


def test_upstream_loads_a_checkpoint_with_streams_of_all_ranks(module: ModuleType) -> None:
    saved = {"rng_tracker_states": {PACK.EXPERT: torch.ones(1)}, KEY: {(0, 0): torch.ones(1), (1, 0): torch.zeros(1)}}
    asked = {"rng_state": SimpleNamespace(data=[{}])}
    ((_, read),) = OVERLAY.replacements.values()

    loaded, *_ = read.make(
        lambda load_dir, args, sharded_state_dict: ({"rng_state": [dict(saved)]}, "", False, None), module
    )(None, None, sharded_state_dict=asked)

    assert loaded["rng_state"] == [{"rng_tracker_states": saved["rng_tracker_states"]}]
