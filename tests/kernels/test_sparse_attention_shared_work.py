"""Resources of the warp-specialised kernels of sparse attention, compiled for Hopper on any host.

The results of these kernels are tested in tests/gpu.
"""

from __future__ import annotations

from typing import Any

import compiled_programs
import pytest
from releases import only

COMPILED = ("128:576:512:1", "128:576:512:-1", "64:512:512:1", "128:640:512:1", "64:384:256:1", "100:200:128:1")
"""Cases, HEADS:DIM:VALUE:SIGN; SIGN is that of the scale.

They cover tiles of 64 and of 32 slots, rings of two to four tiles, and keys with and without channels in a second part. The last case
has no ring in either pass: its `attend_rows` is the kernel of `device_code`, whose warps do not share out the work.
"""
DAILY = COMPILED[:1]


@pytest.fixture(scope="module")
def programs(grid_size: str) -> dict[str, Any]:
    """Return the resources of every kernel by case, as `sparse_attention_shared_work_targets.py` reports them."""
    compiled = DAILY if grid_size == "few" else COMPILED
    return compiled_programs.needs("sparse_attention_shared_work_targets.py", *compiled, MEGACPP_OVERLAYS="off")


@pytest.fixture(params=only(COMPILED, DAILY))
def sharing(programs: dict[str, Any], request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return the resources of the kernels `attend_rows` and `score_side` of one case."""
    return [each for each in programs[request.param] if each["kernel"] in {"attend_rows", "score_side"}]


def test_shared_memory_fits_a_multiprocessor(sharing: list[dict[str, Any]]) -> None:
    assert sharing
    assert [each for each in sharing if each["shared"] > compiled_programs.SHARED_OF_HOPPER] == []


def test_no_register_is_spilled_to_the_stack(sharing: list[dict[str, Any]]) -> None:
    assert [each for each in sharing if each["stack"] > 0] == []


def test_a_kernel_waits_at_most_once_for_four_products(sharing: list[dict[str, Any]]) -> None:
    assert [each for each in sharing if 4 * each["waits for products"] > each["products"]] == []
