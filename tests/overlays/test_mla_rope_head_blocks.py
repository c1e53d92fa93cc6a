"""MLA's fused rotary embeddings with the overlay: right for every block of heads that the tuner may choose. Upstream's kernels are interpreted."""

from __future__ import annotations

import json
import os
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import warm_python
from hypothesis import given
from hypothesis import strategies as st
from places import HANG_S, SUPPORT

from megacpp_overlays.feature_probes.mla_rope_head_blocks import OF_QUERIES
from megacpp_overlays.overlays.mla_rope_head_blocks import LAUNCHES, OVERLAY, allowed

ROUNDING = 1e-5
BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128)
HEADS = (1, 2, 3, 6, 8, 20)
EVERY_DAY = (6,)
"""Blocks of 1 and 2 heads divide it, of 4 do not, and of 8 are wider."""


class Config:
    """A stand-in for a Triton configuration."""

    def __init__(self, kwargs: dict[str, int], num_warps: int = 4, num_stages: int = 3) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages


@given(st.integers(1, 300), st.booleans())
def test_a_block_that_is_allowed_never_goes_on_into_the_next_token(heads: int, in_place: bool) -> None:
    found = allowed([Config({"BLOCK_H": each}) for each in BLOCKS], heads, in_place=in_place)

    blocks = [each.kwargs["BLOCK_H"] for each in found]
    assert blocks == [each for each in BLOCKS if each >= heads or heads % each == 0]
    assert blocks[0] == 1
    assert {each.num_warps for each in found} == ({1} if in_place else {4})
    assert {each.num_stages for each in found} == {3}


@pytest.fixture(scope="module")
def numbers(grid_size: str) -> tuple[int, ...]:
    """Return the numbers of heads that are tried: all of them in the full tests."""
    return EVERY_DAY if grid_size == "few" else HEADS


@pytest.fixture(scope="module")
def facts(numbers: tuple[int, ...]) -> Any:
    env = {**os.environ, "PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    process = warm_python.start(
        ["-W", "ignore", SUPPORT / "rotated_heads.py", *map(str, numbers)], env, after=warm_python.INTERPRETER
    )
    out, error = process.communicate(HANG_S)
    assert process.returncode == 0, error[-4000:]
    return json.loads(out)


@pytest.mark.upstream
def test_queries_keys_values_and_their_gradients_are_those_of_pytorch(facts: Any) -> None:
    assert facts["decision"] == "active"
    assert facts["worst"] < ROUNDING


@pytest.mark.upstream
@pytest.mark.parametrize("launch", LAUNCHES[OF_QUERIES], ids=lambda each: each.kernel)
def test_a_tuner_tries_only_configurations_that_are_right_for_the_heads(
    launch: Any, numbers: tuple[int, ...], facts: Any
) -> None:
    for heads in numbers:
        tried = [tuple(each) for each in facts["tried"][str(heads)][launch.kernel]]
        blocks = [each for each in BLOCKS if each >= heads or heads % each == 0]
        assert tried == [(block, 1 if launch.in_place else 4) for block in blocks]


@pytest.mark.upstream
def test_upstreams_tuners_are_as_they_were_after_a_launch_and_after_several_at_once(facts: Any) -> None:
    assert facts["left"] == {launch.kernel: [True, 0] for launch in LAUNCHES[OF_QUERIES]}
    assert facts["undone"]


def test_without_triton_nothing_is_tuned_and_the_seam_passes_calls_on() -> None:
    module: Any = ModuleType("without_triton")
    for launch in LAUNCHES[OF_QUERIES]:
        setattr(module, launch.kernel, lambda *_: None)
    (replacement, *_) = OVERLAY.replacements[OF_QUERIES]

    assert OVERLAY.witness is not None
    assert OVERLAY.witness(module).broken
    assert not OVERLAY.self_test(module).broken
    assert replacement.make(lambda *args, **kwargs: (args, kwargs), module)(1, b=2) == ((1,), {"b": 2})


def test_configurations_that_a_tuner_left_out_before_are_left_out_still() -> None:
    seen: list[int] = []

    class Tuner(SimpleNamespace):
        """Stand-in for a tuner with the attributes that the seam uses, and with a pruning function of its own."""

    def of_old(configs: Any, _named: Any, **_more: Any) -> Any:
        return [each for each in configs if each.kwargs["BLOCK_H"] != 2]

    tuner = Tuner(configs=[Config({"BLOCK_H": each}) for each in (1, 2, 4, 8)], early_config_prune=of_old, cache={})
    module: Any = ModuleType("made_up")
    launch = LAUNCHES[OF_QUERIES][2]
    setattr(module, launch.kernel, tuner)

    def original() -> None:
        seen.extend(each.kwargs["BLOCK_H"] for each in tuner.early_config_prune(tuner.configs, {"head_num": 6}))
        tuner.cache["tuned"] = 1

    OVERLAY.replacements[OF_QUERIES][2].make(original, module)()

    assert seen == [1, 8]
    assert tuner.early_config_prune is of_old
    assert tuner.cache == {}
