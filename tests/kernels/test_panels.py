"""Blocks of classes that share the memory of one where few tokens count: their division, and their results.

On the CPU, in plain PyTorch, and with the passes in Triton's interpreter. Products in Triton are in
test_bounded_products; the GPU is tested in tests/gpu.
"""

from __future__ import annotations

import itertools
from typing import Any

import kept_answers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cross_entropy_cases import IGNORED, Inputs, call, draw, found, leaves_of, truth

from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory
from megacpp_overlays.kernels.linear_cross_entropy.shard import GradientRequest, Shard
from megacpp_overlays.kernels.linear_cross_entropy.shard_passes import shard_gradients, shard_statistics
from megacpp_overlays.kernels.masked_products.panels import CLASS_ALIGNMENT, Panels
from megacpp_overlays.kernels.masked_products.row_counts import ROW_ALIGNMENT
from megacpp_overlays.kernels.masked_products.token_selection import select
from megacpp_overlays.kernels.vocabulary_softmax.numbers import Coefficients

SIZES = TOKENS, _, CLASSES = 520, 6, 4 * CLASS_ALIGNMENT + 72
WAYS = {
    "all that have room": Memory(block_classes=CLASS_ALIGNMENT, masked="skip"),
    "two": Memory(block_classes=CLASS_ALIGNMENT, masked="skip", panels=2),
    "alone": Memory(block_classes=CLASS_ALIGNMENT, masked="skip", panels=1),
}


def labelled(count: int, **options: Any) -> Inputs:
    """Return a call that ignores all but so many tokens, anywhere."""
    inputs = draw(*SIZES, **options)
    target = torch.where(inputs.alive, inputs.target, 0)
    target[torch.randperm(TOKENS, generator=torch.Generator().manual_seed(count))[count:]] = IGNORED
    inputs.target, inputs.hidden, inputs.weight = target, inputs.hidden.contiguous(), inputs.weight.contiguous()
    return inputs


def counted(count: int) -> torch.Tensor:
    return torch.tensor([count], dtype=torch.int32)


def close(seen: dict[str, torch.Tensor], true: dict[str, torch.Tensor]) -> None:
    assert seen.keys() == true.keys()
    for name, each in true.items():
        torch.testing.assert_close(seen[name].double(), each.double(), rtol=1e-9, atol=1e-9, equal_nan=True)


@settings(deadline=None)
@given(
    count=st.integers(0, 3000), rows=st.integers(2 * ROW_ALIGNMENT, 3000), number=st.integers(2, 12),
    last=st.integers(1, CLASS_ALIGNMENT),
    most=st.sampled_from([0, 2, 3, 100]),
)  # fmt: skip
def test_groups_have_every_class_once_and_room_for_every_row(
    count: int, rows: int, number: int, last: int, most: int
) -> None:
    count = min(count, rows)
    panels = Panels.cut((number - 1) * CLASS_ALIGNMENT + last, CLASS_ALIGNMENT, rows, counted(count), most)
    assert panels is not None

    groups = [list(panels.slices(group)) for group in range(panels.number)]

    classes = [each for group in groups for _, part in group for each in range(part.start, part.stop)]
    assert classes == list(range(panels.classes))
    sizes = [len(group) for group in groups if group]
    assert sizes == [len(group) for group in groups[: len(sizes)]]
    assert max(sizes) == sizes[0] <= (most or panels.number)
    assert max(sizes) - min(sizes[:-1], default=sizes[0]) == 0
    for group in groups:
        assert all(part.stop - part.start >= count for part, _ in group)
        assert all(one.stop == other.start for (one, _), (other, _) in itertools.pairwise(group))
        assert not group or group[-1][0].stop <= rows
    assert [panels.is_last_group(group) for group in range(panels.number)] == [
        index == len(sizes) - 1 for index in range(panels.number)
    ]


@pytest.mark.parametrize(
    ("classes", "width", "rows", "most"),
    [(1000, 256, 255, 0), (256, 256, 1000, 0), (1000, 128, 1000, 0), (1000, 300, 1000, 0), (1000, 256, 1000, 1)],
    ids=["few rows", "one block", "narrow", "not whole tiles", "not wanted"],
)
def test_other_blocks_share_nothing(classes: int, width: int, rows: int, most: int) -> None:
    assert Panels.cut(classes, width, rows, counted(1), most) is None


def test_a_number_of_panels_below_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="panels is -1"):
        Memory(panels=-1)


@pytest.mark.parametrize("count", [0, 1, 100, 128, 129, 260, 520])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_losses_and_gradients_are_those_of_float64(count: int, way: str, reduction: str) -> None:
    inputs = labelled(
        count,
        bias=True,
        class_weight=True,
        label_smoothing=0.1,
        softcap=3.0,
        lse_square_scale=0.03,
        reduction=reduction,
    )

    close(found(inputs, memory=WAYS[way]), truth(inputs))


def test_fewer_tokens_in_a_later_pass_find_the_group_that_stayed() -> None:
    inputs = labelled(200, bias=True)
    leaves = leaves_of(inputs)
    loss = call(inputs, memory=WAYS["all that have room"])

    for share in (0.3, 1.0, 0.0):
        inputs.arriving = torch.where(torch.rand(TOKENS) < share, inputs.arriving, 0.0)
        slopes = torch.autograd.grad(loss, list(leaves.values()), inputs.arriving, retain_graph=True)
        true = truth(inputs)
        close(dict(zip(leaves, slopes, strict=True)), {name: true[name] for name in leaves})


def test_a_block_of_all_tokens_stays_before_panels_of_some() -> None:
    """So it is where a forward pass computes every token, and a backward pass finds that few have a gradient."""
    inputs = labelled(TOKENS, bias=True)
    inputs.arriving = torch.where(torch.arange(TOKENS) < 400, 0.0, inputs.arriving)
    memory = Memory(block_classes=CLASS_ALIGNMENT)

    for _ in range(2):
        close(found(inputs, memory=memory), truth(inputs))
    assert memory.settled.skips
    assert not memory.settled.skips_labels


@pytest.mark.parametrize("count", [0, 100, 520])
def test_other_ranks_get_the_whole_gradient_of_hidden_states_before_the_last_product(count: int) -> None:
    from computed_products import Products

    inputs = labelled(count)
    shard, memory = Shard(weight=inputs.weight, logits_dtype=torch.float64), WAYS["two"]
    selection = select(inputs.alive)
    running, kept = shard_statistics(inputs.hidden, inputs.target, shard, memory, selection=selection)
    scale = torch.where(inputs.alive, inputs.arriving, 0.0).double()
    heard = []

    with Products() as counted:
        gradients = shard_gradients(
            inputs.hidden, inputs.target, shard, Coefficients(running.lse, scale, scale), memory, GradientRequest(),
            kept=kept, selection=selection, when_hidden_is_done=lambda found: heard.append((found.clone(), len(counted.shapes))),
        )  # fmt: skip

    [(found_, before)] = heard
    true = truth(inputs)
    assert before < len(counted.shapes)
    torch.testing.assert_close(found_[:count].double(), true["hidden"][inputs.alive].double())
    assert gradients.of_weight is not None
    torch.testing.assert_close(gradients.of_weight.double(), true["weight"].double())


def test_kept_logits_of_few_tokens_are_not_computed_again() -> None:
    from computed_products import products

    inputs = labelled(100)
    shapes = {name: products(lambda memory=each: found(inputs, memory=memory)) for name, each in WAYS.items()}
    logits = {
        name: sum(shape[0] * shape[1] for shape in each if shape[1] in (CLASS_ALIGNMENT, 72))
        for name, each in shapes.items()
    }

    assert logits["alone"] == 100 * (2 * CLASSES - CLASS_ALIGNMENT)
    assert logits["two"] == 100 * (2 * CLASSES - 2 * CLASS_ALIGNMENT)
    assert logits["all that have room"] == 100 * (2 * CLASSES - 3 * CLASS_ALIGNMENT)


def test_triton_agrees_with_float64(grid_size: str) -> None:
    pytest.importorskip("triton")
    facts = kept_answers.answer("panel_facts.py", grid_size, TRITON_INTERPRET="1")

    assert len(facts) == (1 if grid_size == "few" else 5)
    assert {name: each for name, each in facts.items() if not max(each["errors"]) < each["rounding"]} == {}
