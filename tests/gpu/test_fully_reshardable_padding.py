"""Fully reshardable checkpoints of DistributedOptimizer on a GPU: NCCL, one rank, through files.

Needs megatron-core 0.19.2; neither Transformer Engine nor Apex: the inner optimizer is the one of `reshardable_runs`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from launched_reshardable import ID, differences, dumped, launch, saved, step

from megacpp_overlays.upkeep.checkpoint import masters

pytestmark = [pytest.mark.gpu, pytest.mark.upstream]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("gpu")
    [said] = launch(
        folder / "plan",
        1,
        step("overlays", off=[ID]),
        step("build", seed=1, bucket=2000, steps=2),
        step("dump", to=folder / "truth"),
        step("save", to=folder / "broken", efficient=False),
        step("overlays", off=[]),
        step("save", to=folder / "right", efficient=False),
        step("save", to=folder / "by-gloo", efficient=True),
        step("build", seed=2, bucket=3500, steps=1),
        step("load", source=folder / "right", efficient=False),
        step("dump", to=folder / "state"),
        step("build", seed=3, bucket=3500, steps=0),
        step("load", source=folder / "broken", efficient=False),
        device="cuda",
    )
    return SimpleNamespace(folder=folder, truth=dumped(folder / "truth"), said=said)


def test_without_it_state_is_saved_under_other_names(run: SimpleNamespace) -> None:
    wrong = differences(run.truth, saved(run.folder / "broken"))

    assert len(wrong) > 1
    assert masters.check(run.folder / "broken").verdict is masters.CheckpointVerdict.BROKEN


@pytest.mark.parametrize("folder", ["right", "by-gloo"])
def test_with_it_every_state_is_saved_under_its_own_name(run: SimpleNamespace, folder: str) -> None:
    assert differences(run.truth, saved(run.folder / folder)) == []
    assert masters.check(run.folder / folder).verdict is masters.CheckpointVerdict.RIGHT


def test_other_buckets_read_the_same(run: SimpleNamespace) -> None:
    assert run.said[8] == ""
    assert differences(run.truth, dumped(run.folder / "state")) == []


def test_what_was_written_broken_is_refused(run: SimpleNamespace) -> None:
    assert run.said[11].startswith("CheckpointError: ")
    assert "layer0.weight" in run.said[11]
