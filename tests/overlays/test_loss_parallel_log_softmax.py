"""Losses of sharded logits with the overlay: gradients under `loss_parallel` are those of whole logits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from placed_seams import placed, without_overlays
from places import ROOT, SUPPORT
from reproduced_pack import assert_repaired, reproduced_in

from megacpp_overlays.feature_probes.loss_parallel_log_softmax import IDENTITY, TARGET
from megacpp_overlays.overlays.loss_parallel_log_softmax import OVERLAY, observe

pytestmark = pytest.mark.upstream


@pytest.mark.parametrize("lane", ["current", "edge"])
def test_a_release_is_broken_without_the_overlay_and_right_with_it(lane: str) -> None:
    assert_repaired(reproduced_in(lane, "60"))


# In this process


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    """The module of `loss_parallel` without any overlay."""
    with without_overlays(TARGET.module) as found:
        yield found


@pytest.fixture
def repaired(module: ModuleType) -> Iterator[ModuleType]:
    """The same with the seams."""
    with placed(OVERLAY, IDENTITY, module):
        yield module


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(module: ModuleType) -> None:
    assert observe(module).broken
    with placed(OVERLAY, IDENTITY, module):
        assert not observe(module).broken
    assert observe(module).broken


@pytest.fixture(scope="module")
def found() -> Any:
    """What losses and neighbours come to in a process that has run no backward pass: ranks are its copies."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", SUPPORT / "loss_parallel_ranks.py"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def test_what_is_right_without_the_overlay_has_the_same_bits(found: Any) -> None:
    assert set(found["neighbours"].values()) == {None}, found["neighbours"]
    assert len(found["neighbours"]) == 7


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-6), ("bfloat16", 2e-2), ("float16", 2e-3)]
)
def test_losses_have_the_gradients_of_whole_logits(found: Any, dtype: str, tolerance: float) -> None:
    off = found["off"][dtype]

    assert {"distillation", "entropy"} < off.keys()
    assert (
        dtype != "float64" or {"preference", "softmax_twice", "changed_on_the_way", "two_cross_entropies"} < off.keys()
    )
    assert max(off.values()) < tolerance, off


def test_passes_are_upstreams_again_after_the_context(repaired: ModuleType) -> None:
    passes = repaired.DTensor._op_dispatcher._custom_op_handlers
    before = dict(passes)
    with repaired.loss_parallel():
        assert passes != before
    assert passes == before
