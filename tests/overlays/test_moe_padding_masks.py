"""Real routers and pipeline stages under padding masks with the overlays: tokens are counted, and masks are those of a rank's tokens.

Both overlays of the pack are tried here. What is measured is in `masked_stages.py`, in a process of its own for each release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from masked_stages import HIDDEN, IDS, RANKS, ROWS, TOKENS, mask
from placed_seams import overlays_out, placed
from places import SUPPORT
from releases import daily, newest
from upstream_imports import upstream_module

from megacpp_overlays.loader import seams
from megacpp_overlays.overlays import expert_bias_padding_mask, pipeline_padding_mask

pytestmark = pytest.mark.upstream

RELEASES = ("0.16.1", "0.18.2", newest())
COUNTS, STAGES = OVERLAYS = (expert_bias_padding_mask.OVERLAY, pipeline_padding_mask.OVERLAY)
CUT = ("first", "states given", "later", "later, cut before", "own group")


@pytest.fixture(scope="module", params=daily(*RELEASES))
def measured(request: pytest.FixtureRequest, megatron_says: Callable[..., Any]) -> Any:
    """What a release does with the overlays and without them."""
    answer = megatron_says(request.param, SUPPORT / "masked_stages.py")
    assert answer["decisions"] == dict.fromkeys(IDS, "active")
    assert len(answer["ranks"]) == RANKS
    return answer


def test_upstream_ends_in_an_error_or_counts_what_is_padding(measured: Any) -> None:
    off = measured["router"]["off"]

    assert "must match the size" in off["more tokens"]["error"]
    assert off["as many tokens"]["counted"] != off["as many tokens"]["right"]


def test_tokens_are_counted_without_padding_and_nothing_else_changes(measured: Any) -> None:
    on, off = measured["router"]["on"], measured["router"]["off"]

    for way in ("more tokens", "as many tokens", "no mask"):
        assert on[way]["counted"] == on[way]["right"], way
    for way in ("no mask", "no bias"):
        assert on[way] == off[way]
    assert on["no bias"]["counted"] is None
    assert on["as many tokens"]["gradient"] == off["as many tokens"]["gradient"]


def test_upstream_cuts_on_the_first_stage_and_for_the_default_group_alone(measured: Any) -> None:
    for rank in measured["ranks"]:
        off = rank["off"]
        assert {way: off[way] == off["right"] for way in CUT} == {
            "first": True,
            "states given": False,
            "later": False,
            "later, cut before": True,
            "own group": False,
        }
        assert "must match the size" in off["later, run"]


def test_each_rank_has_the_mask_of_its_own_tokens(measured: Any) -> None:
    rights = [rank["on"]["right"] for rank in measured["ranks"]]

    assert rights[0] != rights[1]
    for rank in measured["ranks"]:
        for way in CUT:
            assert rank["on"][way] == rank["on"]["right"], way
        assert rank["on"]["later, run"] == [TOKENS // RANKS, ROWS, HIDDEN]


def test_a_mask_that_is_not_one_of_all_ranks_is_left_alone(measured: Any) -> None:
    for rank in measured["ranks"]:
        for way in (
            "later, of another length",
            "later, without a mask",
            "nothing to compare with",
            "own group, of another length",
            "rest",
        ):
            assert rank["on"][way] == rank["off"][way], way
        assert "does not match input_ids" in rank["on"]["own group, of another length"]


# In this process


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """Upstream as it is, without any overlay."""
    found = {each.target.module: upstream_module(each.target.module) for each in OVERLAYS}
    with overlays_out():
        yield found


@pytest.mark.parametrize("overlay", OVERLAYS, ids=IDS)
def test_the_witness_sees_the_defect_and_the_self_test_its_absence(
    overlay: Any, modules: dict[str, ModuleType]
) -> None:
    module = modules[overlay.target.module]

    assert overlay.witness(module).broken
    for shape in overlay.replacements:
        with placed(overlay, shape, module):
            assert not overlay.self_test(module).broken
            with torch.inference_mode():
                assert not overlay.self_test(module).broken
    assert overlay.self_test(module).broken


def test_counts_without_a_mask_fail_the_self_test(modules: dict[str, ModuleType]) -> None:
    module = modules[COUNTS.target.module]
    ((replacement,),) = COUNTS.replacements.values()
    owner, name = seams.resolve(module, replacement.symbol)
    seam = seams.replace(
        owner, name, lambda original: lambda self, chosen, _mask=None: original(self, chosen), overlay_id="no-mask"
    )
    try:
        assert COUNTS.self_test(module).broken
    finally:
        seam.undo()


def counted(tokens: int, given: Any, *, bias: bool = True, gradients: bool = True) -> Any:
    """Return what upstream is given for a map of tokens and a mask."""
    seen: list[Any] = []
    ((replacement,),) = COUNTS.replacements.values()
    count = replacement.make(lambda *all_of_it: seen.append(all_of_it[1:]), ModuleType("routers"))
    with torch.set_grad_enabled(gradients):
        count(SimpleNamespace(enable_expert_bias=bias), torch.ones(tokens, 2, dtype=torch.bool), given)
    (found,) = seen
    return found


@pytest.mark.parametrize("shape", [(4,), (4, 1), (2, 2), (1, 4)])
def test_a_mask_of_tokens_is_laid_over_tokens_in_whatever_shape(shape: tuple[int, ...]) -> None:
    chosen, left = counted(4, torch.tensor([False, True, True, False]).reshape(shape))

    assert left is None
    assert chosen.tolist() == [[True, True], [False, False], [False, False], [True, True]]


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (None, {}),
        (torch.zeros(4, dtype=torch.bool), {"bias": False}),
        (torch.zeros(4, dtype=torch.bool), {"gradients": False}),
        (torch.zeros(4, 2, dtype=torch.bool), {}),
        (torch.zeros(3, dtype=torch.bool), {}),
    ],
    ids=["no mask", "no bias", "no gradients", "of tokens and experts", "of other tokens"],
)
def test_upstream_counts_with_its_own_arguments_otherwise(given: Any, asked: dict[str, Any]) -> None:
    chosen, left = counted(4, given, **asked)

    assert left is given
    assert bool(chosen.all())


def test_a_stage_without_sequence_parallelism_is_upstream_s(modules: dict[str, ModuleType]) -> None:
    seen: list[Any] = []
    ((replacement,), _) = STAGES.replacements.values()

    def upstream(self: Any, input_ids: Any, padding_mask: Any = None) -> None:
        seen.append((self, input_ids, padding_mask))

    prepare = replacement.make(upstream, modules[STAGES.target.module])
    model = SimpleNamespace(config=SimpleNamespace(sequence_parallel=False))
    given = mask()
    prepare(model, None, given)
    prepare(model, input_ids=None, padding_mask=given)

    assert seen == [(model, None, given)] * 2
