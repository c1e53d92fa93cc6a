"""Real releases of Megatron with the overlay: a function that returns its input has the same results with recompute as without.

A norm with the contract of Transformer Engine's fused residual one is run by the real `CheckpointWithoutOutput` and in real transformer layers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from places import SUPPORT
from releases import daily, newest

from megacpp_overlays.overlays.residual_norm_recompute_alias import OVERLAY, observe

pytestmark = pytest.mark.upstream

BROKEN = ("0.17.1", "0.18.2", newest())
ABSENT = "0.16.1"
ALIASED = ("norm_first", "norm_last", "part_of_the_input", "the_input_alone", "layers")
OTHERS = ("nothing_of_the_input",)


@pytest.fixture(scope="module", params=daily(*BROKEN))
def measured(request: pytest.FixtureRequest, megatron_says: Callable[..., Any], grid_size: str) -> Any:
    """Results of a release with the overlay and without it."""
    storage = {"RESIDUAL_NORMS_STORAGE": "copied"} if grid_size == "few" else {}
    return megatron_says(request.param, SUPPORT / "residual_norms.py", **storage)


def test_values_and_gradients_are_those_without_recompute(measured: Any) -> None:
    assert measured["decision"] == "active"
    assert measured["on"] == dict.fromkeys((*ALIASED, *OTHERS), "equal")


def test_upstream_reads_memory_that_it_freed(measured: Any) -> None:
    assert all(measured["off"][each] != "equal" for each in ALIASED)
    assert all(measured["off"][each] == "equal" for each in OTHERS)


@pytest.mark.full
def test_a_release_without_such_a_norm_is_left_alone(megatron_says: Callable[..., Any]) -> None:
    found = megatron_says(ABSENT, SUPPORT / "residual_norms.py", *OTHERS)

    assert found == {"decision": "absent", "on": {OTHERS[0]: "equal"}, "off": {OTHERS[0]: "equal"}}


def made(*, kept: str) -> Any:
    """Return a module whose checkpoint frees the outputs that are not to be kept."""

    class CheckpointWithoutOutput:
        def checkpoint(self, run: Callable[..., Any], states: Any) -> Any:
            from megatron.core.transformer.cuda_graphs import is_graph_warmup

            assert not is_graph_warmup()
            module._get_all_rng_states()
            doubled, residual = run(states)
            self.outputs = {"none": (doubled, residual), "all": (), "computed": (residual,)}[kept]
            return doubled, residual.view_as(residual)

        def discard_output_and_register_recompute(self, _: Any) -> None:
            for each in self.outputs:
                each.untyped_storage().resize_(0)

    def read() -> None:
        raise AssertionError("the state of CUDA's random numbers was read")

    module = SimpleNamespace(CheckpointWithoutOutput=CheckpointWithoutOutput, _get_all_rng_states=read)
    return module


@pytest.mark.parametrize("kept", ["none", "all", "computed"])
def test_freeing_too_much_or_too_little_fails_the_self_test(kept: str) -> None:
    module = made(kept=kept)
    theirs = module._get_all_rng_states

    assert observe(module).broken
    assert module._get_all_rng_states is theirs
    assert OVERLAY.self_test is observe


def test_with_the_seam_a_checkpoint_that_frees_all_outputs_keeps_the_input() -> None:
    module = made(kept="none")
    ((replacement,),) = OVERLAY.replacements.values()
    cls = module.CheckpointWithoutOutput
    cls.checkpoint = replacement.make(cls.checkpoint, module)

    assert not observe(module).broken
