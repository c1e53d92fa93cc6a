"""torch.compile on a GPU: the CUDA graphs that Inductor records itself follow the code, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from made_up import Upstream
from traced_seams import TEXT, measured_on, overlay_at

from megacpp_overlays.loader.session import Session
from megacpp_overlays.runtime import dynamo

# Inductor warns as it likes.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def test_graphs_that_inductor_recorded_follow_arming_undoing_and_arming_again(
    upstream: Upstream, session: Callable[..., Session]
) -> None:
    upstream.write(TEXT)
    current = session(overlay_at(upstream, "Block.method"))
    block = upstream.load().Block()

    def step(x: torch.Tensor) -> torch.Tensor:
        return block.method(x).sin()

    whole = torch.compile(step, mode="reduce-overhead")
    for change in (lambda: None, current.arm, current.undo, current.arm):
        change()
        expected = measured_on("cuda", step)
        for _ in range(4):  # warms up, records, replays
            torch.compiler.cudagraph_mark_step_begin()
            assert measured_on("cuda", whole) == pytest.approx(expected, rel=1e-5)
    assert dynamo.graphs() == 1
