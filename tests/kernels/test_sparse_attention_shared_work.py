"""Attention over chosen keys whose warps share out the work, compiled for Hopper on any host; its results are in tests/gpu."""

from __future__ import annotations

from typing import Any

import compiled_programs
import pytest
from releases import only

COMPILED = ("128:576:512:1", "128:576:512:-1", "64:512:512:1", "128:640:512:1", "64:384:256:1", "100:200:128:1")
"""HEADS:DIM:VALUE:SIGN: tiles of 64 and 32 slots, rings of two to four, a rest of channels and none, few channels backward."""


DAILY = COMPILED[:1]


@pytest.fixture(scope="module")
def programs(grid_size: str) -> dict[str, Any]:
    """Results of `sparse_attention_shared_work_targets.py`."""
    compiled = DAILY if grid_size == "few" else COMPILED
    return compiled_programs.needs("sparse_attention_shared_work_targets.py", *compiled, MEGACPP_OVERLAYS="off")


@pytest.fixture(params=only(COMPILED, DAILY))
def sharing(programs: dict[str, Any], request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Resources of the kernels whose warps share out the work."""
    return [each for each in programs[request.param] if each["kernel"] in {"attend_rows", "score_side"}]


def test_they_fit_a_multiprocessor(sharing: list[dict[str, Any]]) -> None:
    assert sharing
    assert [each for each in sharing if each["shared"] > compiled_programs.SHARED_OF_HOPPER] == []


def test_their_sums_stay_in_registers(sharing: list[dict[str, Any]]) -> None:
    assert [each for each in sharing if each["stack"] > 0] == []


def test_the_matrix_unit_is_not_waited_for_after_each_product(sharing: list[dict[str, Any]]) -> None:
    assert [each for each in sharing if 4 * each["waits for products"] > each["products"]] == []
