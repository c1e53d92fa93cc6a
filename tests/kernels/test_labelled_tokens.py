"""Linear cross entropy over the tokens that have a label: the products that it skips, and unchanged results.

On the CPU, in plain PyTorch. Triton is tested in test_vocabulary_softmax, the GPU in tests/gpu.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from computed_products import products
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cross_entropy_cases import IGNORED, Inputs, call, draw, found, leaves_of, truth

from megacpp_overlays.kernels.linear_cross_entropy import entry
from megacpp_overlays.kernels.linear_cross_entropy import memory as linear_cross_entropy_memory
from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory
from megacpp_overlays.kernels.linear_cross_entropy.parallel import Group, Layer, Terms, backward_pass, forward_pass
from megacpp_overlays.kernels.linear_cross_entropy.shard import GradientRequest
from megacpp_overlays.kernels.masked_products.token_selection import Selection

BLOCKS = Memory(block_classes=4, masked="skip")
KEPT = Memory(logits="keep", masked="skip")
WAYS = {"blocks": BLOCKS, "one block": Memory(masked="skip"), "keep": KEPT}
FEW_CLASSES = Memory(extra_mib=1, masked="skip")
TOKENS = 40
COUNTS = st.one_of(st.sampled_from([0, 1, TOKENS]), st.integers(0, TOKENS))


@pytest.fixture(params=WAYS)
def memory(request: pytest.FixtureRequest) -> Memory:
    return WAYS[request.param]


def labelled(inputs: Inputs, count: int, seed: int = 0) -> Inputs:
    """Ignore all but so many tokens, anywhere."""
    inputs.target[~inputs.alive] = 0  # those that the draw ignored
    order = torch.randperm(len(inputs.target), generator=torch.Generator().manual_seed(seed))
    inputs.target[order[count:]] = IGNORED
    inputs.hidden, inputs.weight = inputs.hidden.contiguous(), inputs.weight.contiguous()
    return inputs


def close(seen: dict[str, torch.Tensor], true: dict[str, torch.Tensor]) -> None:
    assert seen.keys() == true.keys()
    for name, each in true.items():
        torch.testing.assert_close(seen[name].double(), each.double(), rtol=1e-9, atol=1e-9, equal_nan=True)


# Results


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**31),
    count=COUNTS,
    with_gradient=st.sampled_from([0.0, 0.5, 1.0]),
    reduction=st.sampled_from(["none", "sum", "mean"]),
    bias=st.booleans(),
    class_weight=st.booleans(),
    terms=st.fixed_dictionaries(
        {
            "label_smoothing": st.sampled_from([0.0, 0.1]),
            "softcap": st.sampled_from([None, 3.0]),
            "lse_square_scale": st.sampled_from([0.0, 0.03]),
        }
    ),
    way=st.sampled_from(list(WAYS)),
)
def test_losses_and_gradients_are_those_of_float64_for_every_count(
    seed: int, count: int, with_gradient: float, reduction: str, bias: bool, class_weight: bool, terms: dict[str, Any],
    way: str,
) -> None:  # fmt: skip
    inputs = draw(TOKENS, 5, 11, seed=seed, bias=bias, class_weight=class_weight, reduction=reduction, **terms)
    labelled(inputs, count, seed)
    if reduction == "none":
        wanted = torch.rand(TOKENS, generator=torch.Generator().manual_seed(seed)) < with_gradient
        inputs.arriving = torch.where(wanted, inputs.arriving, 0.0)

    close(found(inputs, memory=WAYS[way]), truth(inputs))


@pytest.mark.parametrize("count", [0, 1, 17, TOKENS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_losses_have_the_bits_of_the_same_tokens_alone(dtype: torch.dtype, count: int, memory: Memory) -> None:
    inputs = labelled(draw(TOKENS, 5, 11, dtype=dtype, softcap=3.0, bias=True, lse_square_scale=0.01), count)
    kept = inputs.alive
    alone = replace(inputs, hidden=inputs.hidden[kept], target=inputs.target[kept], arriving=inputs.arriving[kept])

    seen = found(inputs, memory=memory)
    expected = found(alone, memory=replace(memory, masked="compute"))

    assert torch.equal(seen["loss"][kept], expected["loss"])
    assert torch.equal(seen["hidden"][kept], expected["hidden"])
    assert torch.equal(seen["weight"], expected["weight"])
    assert not seen["loss"][~kept].any()
    assert not seen["hidden"][~kept].any()


@pytest.mark.parametrize("count", [0, 1, 170, 400])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_hidden_states_without_room_for_a_copy_are_taken_from_where_they_are(
    count: int, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here there is no room for anything: the gradient alone takes more than the memory."""
    inputs = draw(400, 700, 900, dtype=torch.float32, reduction=reduction, bias=True)
    labelled(inputs, count)
    inputs.hidden = inputs.hidden.clone()
    inputs.hidden[~inputs.alive] = float("nan")
    copied: list[int] = []
    first = Selection.first
    monkeypatch.setattr(Selection, "first", lambda self, rows: copied.append(1) or first(self, rows))

    seen = found(inputs, memory=FEW_CLASSES)

    expected = replace(inputs, hidden=torch.where(inputs.alive.unsqueeze(1), inputs.hidden.detach(), 0.0))
    for name, each in truth(expected).items():
        torch.testing.assert_close(seen[name].double(), each, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert not copied


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 1e308])
def test_hidden_states_of_ignored_tokens_are_not_looked_at(odd: float, memory: Memory) -> None:
    inputs = labelled(draw(TOKENS, 5, 11, bias=True, label_smoothing=0.1), 17)
    expected = found(inputs, memory=memory)
    inputs.hidden = inputs.hidden.detach().clone()
    inputs.hidden[~inputs.alive] = odd

    seen = found(inputs, memory=memory)

    assert all(torch.equal(seen[name], expected[name]) for name in expected)


def test_a_second_backward_pass_skips_others_than_the_first(memory: Memory) -> None:
    inputs = labelled(draw(TOKENS, 5, 11, bias=True), 23)
    leaves = leaves_of(inputs)
    loss = call(inputs, memory=memory)

    for share in (0.5, 1.0, 0.0):
        inputs.arriving = torch.where(torch.rand(TOKENS) < share, inputs.arriving, 0.0)
        slopes = torch.autograd.grad(loss, list(leaves.values()), inputs.arriving, retain_graph=True)
        true = truth(inputs)
        close(dict(zip(leaves, slopes, strict=True)), {name: true[name] for name in leaves})


@pytest.mark.parametrize("masked", ["compute", "skip"])
@pytest.mark.parametrize("logits", ["recompute", "keep"])
def test_a_backward_pass_may_compute_tokens_that_its_forward_pass_skipped(logits: str, masked: str) -> None:
    """As it has to where a result cannot be the end of such products; logits that were kept are then not used."""
    inputs = labelled(draw(TOKENS, 5, 11), 17)
    layer, forward_memory = Layer(weight=inputs.weight), Memory(logits=logits, block_classes=4, masked="skip")
    forward = forward_pass(inputs.hidden, inputs.target, layer, Terms(), Group(), forward_memory)

    hidden, weight, _ = backward_pass(
        inputs.arriving, inputs.hidden, inputs.target, forward.statistics, layer, Terms(), Group(),
        replace(forward_memory, masked=masked), GradientRequest(hidden_dtype=torch.float64), kept=forward.kept,
    )  # fmt: skip

    assert hidden is not None
    assert weight is not None
    close({"loss": forward.losses, "hidden": hidden, "weight": weight}, truth(inputs))


def test_statistics_of_ignored_tokens_are_finite_and_say_nothing() -> None:
    inputs = labelled(draw(TOKENS, 5, 11, label_smoothing=0.1), 17)

    found_ = forward_pass(
        inputs.hidden, inputs.target, Layer(weight=inputs.weight), Terms(label_smoothing=0.1), Group(), BLOCKS
    )

    ignored = ~inputs.alive
    assert [each[ignored].unique().tolist() for each in found_.statistics if each is not None] == [[0], [1], [0], [0]]
    lse = torch.logsumexp(inputs.hidden @ inputs.weight.t(), dim=1)
    torch.testing.assert_close(found_.statistics.lse[~ignored], lse[~ignored])


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_the_entry_for_megatron_skips_them_too(reduction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = labelled(draw(TOKENS, 5, 11, dtype=torch.float32, reduction=reduction), 17)
    arriving = inputs.arriving.float()
    monkeypatch.setattr(linear_cross_entropy_memory, "_chosen", BLOCKS)
    monkeypatch.setenv("LCE_FWD_VOCAB_SPLIT_SIZE", "4")
    monkeypatch.setenv("LCE_BWD_VOCAB_SPLIT_SIZE", "4")

    def step() -> dict[str, torch.Tensor]:
        loss, maximum, total, count, *_, rows = entry.forward_on_any_device(
            inputs.hidden, inputs.weight, inputs.target, None, reduction, IGNORED, False
        )
        assert int(count) == 17
        assert maximum.isfinite().all()
        assert total.isfinite().all()
        of_hidden, of_weight = entry.backward_on_any_device(
            arriving, rows, inputs.weight, inputs.target, maximum, total, count, reduction, IGNORED, None, 0, 1, False
        )
        return {"loss": loss, "hidden": of_hidden, "weight": of_weight}

    shapes = products(step)

    assert {rows for rows, classes in shapes if classes in (3, 4)} == {17}
    for name, each in truth(inputs).items():
        torch.testing.assert_close(step()[name], each.float(), rtol=1e-5, atol=1e-5)


# Skipped tokens


def test_the_last_block_stays_with_the_rows_of_labelled_tokens_alone() -> None:
    inputs = labelled(draw(TOKENS, 5, 11), 17)

    shapes = products(lambda: found(inputs, memory=BLOCKS))

    forward = [(17, 3), (17, 4), (17, 4)]
    last, others = [(4, 5), (17, 5)], [(17, 3), (3, 5), (17, 5), (17, 4), (4, 5), (17, 5)]
    assert shapes == [*forward, *last, *others]


def test_an_evaluation_skips_them_too() -> None:
    inputs = labelled(draw(TOKENS, 5, 11), 17)

    with torch.no_grad():
        shapes = products(lambda: call(inputs, memory=BLOCKS))

    assert shapes == [(17, 3), (17, 4), (17, 4)]


def test_all_tokens_are_computed_without_products_of_selected_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from megacpp_overlays.kernels.linear_cross_entropy import block_sizes, parallel

    for module in (parallel, block_sizes):
        monkeypatch.setattr(module, "available", lambda dtype, *matrices: False)
    inputs = labelled(draw(TOKENS, 5, 11), 17)

    shapes = products(lambda: found(inputs, memory=BLOCKS))

    assert {rows for rows, columns in shapes if columns in (3, 4)} == {TOKENS}


# One look


def rows_of(inputs: Inputs, memory: Memory) -> tuple[int, int]:
    """Return the rows of the first product of a step, which is of the forward pass, and of the last one."""
    shapes = products(lambda: found(inputs, memory=memory))
    return shapes[0][0], shapes[-1][0]


@pytest.mark.parametrize(
    ("labels", "gradients", "later"),
    [
        (0.5, 1.0, (150, 150)),
        (1.0, 0.5, (300, 150)),
        (0.5, 0.5, (150, 75)),
        (1.0, 1.0, (300, 300)),
        (0.8, 1.0, (300, 300)),
    ],
)
def test_auto_looks_at_masks_once_and_skips_tokens_if_it_pays(
    labels: float, gradients: float, later: tuple[int, int]
) -> None:
    inputs = draw(300, 5, 11)
    inputs.target[:] = torch.arange(300) % 11
    inputs.target[int(labels * 300) :] = IGNORED
    inputs.arriving = torch.ones(300, dtype=torch.float64)
    inputs.arriving[: int((1 - gradients) * labels * 300)] = 0.0
    memory = Memory(block_classes=4)

    first = rows_of(inputs, memory)
    second = rows_of(inputs, memory)

    assert first[0] == 300  # no pass has looked at masks yet
    assert second == later
    assert rows_of(replace(inputs, target=inputs.target.clamp(min=0)), memory)[0] == 300
    close(found(inputs, memory=memory), truth(inputs))
