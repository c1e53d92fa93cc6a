"""Real routers and pipeline stages under padding masks with the overlays: tokens are counted, and masks are those of a rank's tokens.

Both overlays of the pack are tried here. Its cases and neighbours run on releases, in a process of their own for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from placed_seams import assert_witness_and_self_test, overlays_out
from releases import newest
from reproduced_pack import assert_neighbours_are_the_same, assert_repaired, measured_on
from upstream_imports import upstream_module

from megacpp_overlays.loader import live_names, seams
from megacpp_overlays.overlays import expert_bias_padding_mask, pipeline_padding_mask

pytestmark = pytest.mark.upstream

COUNTS, STAGES = OVERLAYS = (expert_bias_padding_mask.OVERLAY, pipeline_padding_mask.OVERLAY)
TOKENS, RANKS = 8, 2

measured = measured_on("34", "0.16.1", "0.18.2", newest(), daily=[newest()], neighbours=True)


def test_a_release_is_broken_without_the_overlays_and_right_with_them(measured: Any) -> None:
    assert_repaired(measured, parts=2)


def test_results_that_are_right_without_the_overlays_have_the_same_bits(measured: Any) -> None:
    assert_neighbours_are_the_same(measured)


# In this process


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """Upstream as it is, without any overlay."""
    found = {each.target.module: upstream_module(each.target.module) for each in OVERLAYS}
    with overlays_out():
        yield found


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda each: each.id)
def test_the_witness_sees_the_defect_and_the_self_test_its_absence(
    overlay: Any, modules: dict[str, ModuleType]
) -> None:
    assert_witness_and_self_test(overlay, modules[overlay.target.module], *overlay.replacements)


def test_counts_without_a_mask_fail_the_self_test(modules: dict[str, ModuleType]) -> None:
    module = modules[COUNTS.target.module]
    ((replacement,),) = COUNTS.replacements.values()
    owner, name = live_names.resolve(module, replacement.symbol)
    seam = seams.replace(
        owner, name, lambda original: lambda self, chosen, _mask=None: original(self, chosen), overlay_id="no-mask"
    )
    try:
        assert COUNTS.self_test(module).broken
    finally:
        seam.undo()


def counted(tokens: int, given: Any, *, bias: bool = True, gradients: bool = True) -> Any:
    """Return the arguments that upstream's function gets for a map of tokens and a mask."""
    seen: list[Any] = []
    ((replacement,),) = COUNTS.replacements.values()
    count = replacement.make(lambda *all_of_it: seen.append(all_of_it[1:]), ModuleType("routers"))
    with torch.set_grad_enabled(gradients):
        count(SimpleNamespace(enable_expert_bias=bias), torch.ones(tokens, 2, dtype=torch.bool), given)
    (found,) = seen
    return found


@pytest.mark.parametrize("shape", [(4,), (4, 1), (2, 2), (1, 4)])
def test_a_mask_of_tokens_is_applied_to_tokens_of_any_shape(shape: tuple[int, ...]) -> None:
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


MASK = torch.arange(TOKENS)[None] >= torch.tensor([6, 3])[:, None]
"""Of two rows, which are padded from these tokens on."""
OWN_ROWS = torch.zeros(TOKENS // RANKS, 2, 3)
"""Hidden states of a rank's tokens."""


def handed_on(
    given: Any, *, rank: int = 1, states: Any = None, arrived: Any = None, embeds: bool = False, sequence: bool = True
) -> Any:
    """Return the padding mask that a pipeline stage passes on.

    Args:
        given: the mask that the stage gets.
        rank: the rank in a tensor parallel group that is not the default one.
        states: the caller's tensor in the place of embeddings.
        arrived: the tensor that the previous stage sent.
        embeds: whether it is the first stage.
        sequence: whether there is sequence parallelism.
    """

    def upstream(self: Any, input_ids: Any, decoder_input: Any = None, padding_mask: Any = None) -> Any:
        return "a", "b", "c", "d", "e", padding_mask, "rest"

    ((replacement,), _) = STAGES.replacements.values()
    prepare = replacement.make(upstream, ModuleType("models"))
    model = SimpleNamespace(
        config=SimpleNamespace(sequence_parallel=sequence),
        pg_collection=SimpleNamespace(tp=SimpleNamespace(size=lambda: RANKS, rank=lambda: rank)),
        decoder=SimpleNamespace(input_tensor=arrived),
        pre_process=embeds,
    )
    *first, mask, last = prepare(model, torch.zeros(2, TOKENS), decoder_input=states, padding_mask=given)
    assert (first, last) == (["a", "b", "c", "d", "e"], "rest")
    return mask


@pytest.mark.parametrize(
    "asked",
    [{"arrived": OWN_ROWS}, {"states": OWN_ROWS, "embeds": True}, {"embeds": True}],
    ids=["a later stage", "the first stage with states that are given", "the first stage"],
)
def test_each_rank_has_the_mask_of_its_own_tokens(asked: dict[str, Any]) -> None:
    for rank, own in enumerate(MASK.chunk(RANKS, dim=1)):
        assert torch.equal(handed_on(MASK, rank=rank, **asked), own)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (MASK[:, :-1], {"arrived": OWN_ROWS}),
        (MASK[:, : TOKENS // RANKS], {"arrived": OWN_ROWS}),
        (None, {"arrived": OWN_ROWS}),
        (MASK, {}),
        (MASK, {"arrived": OWN_ROWS, "sequence": False}),
    ],
    ids=["of another length", "cut before", "none", "nothing to compare with", "no sequence parallelism"],
)
def test_a_mask_that_is_not_one_of_all_ranks_is_left_alone(given: Any, asked: dict[str, Any]) -> None:
    assert handed_on(given, **asked) is given


def test_a_mask_of_other_tokens_than_those_to_embed_is_refused_as_upstream_does() -> None:
    with pytest.raises(AssertionError, match="does not match input_ids"):
        handed_on(MASK[:, :-1], embeds=True)
