"""Linear cross entropy whose classes are spread over ranks: the same as in one process, over gloo on the CPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from linear_cross_entropy_cases import call, draw, found, truth
from linear_cross_entropy_rank_cases import CASES, LIMITS
from places import HANG_S, ROOT, SUPPORT
from torch import distributed
from warm_python import WarmProcess

TESTS = SUPPORT


def start(rank: int, ranks: int, meet: Path) -> WarmProcess:
    request = json.dumps({"rank": rank, "ranks": ranks, "meet": str(meet)})
    path = os.pathsep.join(filter(None, [str(TESTS), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    own = {"PYTHONPATH": path, "MEGACPP_OVERLAYS_LOG": "logging", "LINEAR_CROSS_ENTROPY": request}
    command = ["-W", "ignore", str(TESTS / "linear_cross_entropy_rank.py")]
    # One thread a rank: their sums then have one order, and a host with few cores is not kept waiting.
    env = {**os.environ, **own, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    return warm_python.start(command, env)


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of every rank of a group."""
    ranks = request.param
    meet = tmp_path_factory.mktemp("ranks") / "meet"
    running = [start(rank, ranks, meet) for rank in range(ranks)]
    found_ = []
    try:
        for each in running:
            out, err = each.communicate(timeout=HANG_S)
            assert each.returncode == 0, err[-4000:]
            found_.append(json.loads(out))
    finally:
        for each in running:
            each.kill()
    return found_


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_results_of_one_process(reports: list[dict[str, Any]], name: str) -> None:
    limit = LIMITS[CASES[name].dtype]

    for report in reports:
        case = report["cases"][name]
        assert case["problems"] == []
        assert {tensor: error for tensor, error in case["errors"].items() if not error < limit} == {}


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_have_the_same_bits_of_the_loss(reports: list[dict[str, Any]], name: str) -> None:
    first, *others = (report["cases"][name]["bits"] for report in reports)

    assert first
    assert all(other == first for other in others)


def test_a_group_need_not_be_the_whole_world(reports: list[dict[str, Any]]) -> None:
    if len(reports) != 3:
        pytest.skip("the first and the last of three ranks")

    first, outside, last = (report["subgroup"] for report in reports)

    assert outside is None
    for errors in (first, last):
        assert max(errors.values()) < LIMITS["float64"]


def test_shapes_that_would_fit_one_rank_are_refused_by_all(reports: list[dict[str, Any]]) -> None:
    ranks = len(reports)
    shapes = "hidden (4, 3), weight (5, 3), target (4,)"
    expected = [
        f"there must be one target for each of the tokens of {ranks} rank(s): {shapes}",
        f"class_weight must be ({5 * ranks},): {shapes}, class_weight (5,)",
    ]

    assert [report["refusals"] for report in reports] == [expected] * ranks


def test_a_group_of_one_rank_is_no_group(tmp_path: Path) -> None:
    """Sequence parallelism included: its one share is all there is."""
    inputs = draw(6, 3, 8, label_smoothing=0.1)
    true = truth(inputs)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        seen = found(inputs, group=distributed.group.WORLD, sequence_parallel=True)
    finally:
        distributed.destroy_process_group()

    for name, each in true.items():
        torch.testing.assert_close(seen[name], each)


def test_sequence_parallelism_without_a_group_changes_nothing() -> None:
    inputs = draw(6, 3, 8)

    assert torch.equal(call(inputs, sequence_parallel=True), call(inputs))
