"""Scaling of gradients of transposed weights and hidden states in Liger's fused linear cross entropy, with the overlay.

The CPU case and the neighbour cases of pack 72 run on each release in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from liger_releases import Releases
from releases import daily, newest
from reproduced_pack import assert_neighbours_are_the_same, assert_repaired

from megacpp_overlays.feature_probes.liger_flce_strided_gradients import CONTIGUOUS_ROWS
from megacpp_overlays.loader import probing
from megacpp_overlays.model import Verdict
from megacpp_overlays.overlays.liger_flce_strided_gradients import OVERLAY
from megacpp_overlays.source.file_trees import ArchiveTree

pytestmark = pytest.mark.upstream

NEWEST = newest("liger-kernel")
RELEASES = ("0.5.10", "0.6.5", "0.7.0", "0.8.4")


@pytest.fixture(scope="module")
def releases(wheel: Callable[[str, str], Path]) -> Releases:
    pytest.importorskip("triton")
    return Releases(wheel, "reproduced.py")


@pytest.mark.parametrize("version", daily(*RELEASES))
def test_a_release_is_broken_without_the_overlay_and_right_with_it(
    releases: Releases, run_python: Callable[..., Any], version: str
) -> None:
    measured = releases.reproduced(run_python, version, "72", "neighbours")

    assert_repaired(measured)
    assert_neighbours_are_the_same(measured)


def test_the_newest_release_is_fixed_upstream(wheel: Callable[[str, str], Path]) -> None:
    assert probing.examine(OVERLAY, ArchiveTree(wheel("liger-kernel", NEWEST))).verdict is Verdict.FIXED


def test_only_a_gradient_whose_rows_are_not_contiguous_is_copied() -> None:
    (seam,) = OVERLAY.replacements[CONTIGUOUS_ROWS]
    plain, transposed = torch.ones(3, 2), torch.ones(2, 3).t()
    received: list[Any] = []
    multiply = seam.make(lambda *given: received.extend(given), None)

    multiply(torch.ones(()), plain, transposed, None)

    assert received[1] is plain
    assert received[2].stride() == (2, 1)
    assert received[3] is None
