"""Linear cross entropy against float64 autograd of its reference, on the CPU in plain PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from computed_products import products
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cross_entropy_cases import ARRIVES, IGNORED, Inputs, arrival, call, draw, found, leaves_of, truth
from torch.nn import functional

from megacpp_overlays.kernels.linear_cross_entropy import linear_cross_entropy, reference
from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory
from megacpp_overlays.kernels.linear_cross_entropy.parallel import Group, Layer, Terms, backward_pass, forward_pass
from megacpp_overlays.kernels.linear_cross_entropy.shard import GradientRequest

WAYS = [
    Memory(block_classes=4),
    Memory(logits="keep"),
    Memory(block_classes=4, masked="skip"),
    Memory(logits="keep", masked="skip"),
]
"""Several blocks of classes, and the logits of the forward pass; all tokens, and those that have a gradient."""


def close(seen: torch.Tensor | None, true: torch.Tensor | None, tolerance: float = 1e-9) -> None:
    assert (seen is None) == (true is None)
    if seen is not None and true is not None:
        torch.testing.assert_close(seen.double(), true.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def all_close(seen: dict[str, Any], true: dict[str, Any], tolerance: float = 1e-9) -> None:
    assert seen.keys() == true.keys()
    for name in true:
        close(seen[name], true[name], tolerance)


# The definition


@pytest.mark.unmeasured
@settings(deadline=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 9),
    classes=st.integers(1, 11),
    class_weight=st.booleans(),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    reduction=st.sampled_from(["none", "sum", "mean"]),
)
def test_the_reference_is_the_cross_entropy_of_pytorch_where_that_has_the_option(
    seed: int, tokens: int, classes: int, class_weight: bool, label_smoothing: float, reduction: str
) -> None:
    inputs = draw(tokens, 3, classes, seed=seed, bias=True, class_weight=class_weight, reduction=reduction)
    inputs.terms = {"label_smoothing": label_smoothing}

    seen = truth(inputs)["loss"]

    assert inputs.bias is not None
    logits = inputs.hidden @ inputs.weight.t() + inputs.bias
    weights = None if inputs.class_weight is None else inputs.class_weight.double()
    expected = functional.cross_entropy(
        logits, inputs.target, weights, reduction=reduction, label_smoothing=label_smoothing
    )
    close(seen, expected)


def test_the_z_loss_of_the_reference_is_the_square_of_the_log_sum_exp() -> None:
    inputs = draw(5, 4, 7)

    loss, z_loss = reference.token_losses(inputs.hidden, inputs.weight, inputs.target, lse_square_scale=0.1)

    plain, none = reference.token_losses(inputs.hidden, inputs.weight, inputs.target)
    squares = 0.1 * torch.logsumexp(inputs.hidden @ inputs.weight.t(), dim=1).square()
    close(z_loss, torch.where(inputs.alive, squares, 0.0))
    close(loss - plain, z_loss)
    assert not none.any()


# The kernel

TERMS = st.fixed_dictionaries(
    {
        "lse_square_scale": st.sampled_from([0.0, 0.03]),
        "label_smoothing": st.sampled_from([0.0, 0.1, 1.0, -0.1]),
        "softcap": st.sampled_from([None, 0.7, 30.0]),
        "ignore_index": st.sampled_from([IGNORED, 0]),
    }
)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 17),
    hidden=st.integers(1, 9),
    classes=st.integers(1, 23),
    ignored=st.sets(st.integers(0, 16)),
    arrives=st.sampled_from(ARRIVES),
    bias=st.booleans(),
    class_weight=st.sampled_from([None, "contiguous", "strided"]),
    reduction=st.sampled_from(["none", "sum", "mean"]),
    terms=TERMS,
    memory=st.builds(
        Memory,
        logits=st.sampled_from(["recompute", "keep"]),
        block_classes=st.integers(0, 24),
        masked=st.sampled_from(["compute", "skip"]),
    ),
)
def test_loss_and_gradients_are_those_of_float64_autograd(
    seed: int,
    tokens: int,
    hidden: int,
    classes: int,
    ignored: set[int],
    arrives: str,
    bias: bool,
    class_weight: str | None,
    reduction: str,
    terms: dict[str, Any],
    memory: Memory,
) -> None:
    inputs = draw(
        tokens,
        hidden,
        classes,
        seed=seed,
        bias=bias,
        class_weight=class_weight is not None,
        reduction=reduction,
        **terms,
    )
    inputs.target[[place for place in ignored if place < tokens]] = terms["ignore_index"]
    if reduction == "none":
        inputs.arriving = arrival(inputs, arrives)
    if inputs.class_weight is not None and class_weight == "contiguous":
        inputs.class_weight = inputs.class_weight.contiguous()

    seen = found(inputs, memory=memory)

    all_close(seen, truth(inputs))
    assert all(each.dtype == torch.float64 for each in seen.values())


@pytest.mark.parametrize("memory", WAYS)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_hidden_states_may_have_a_batch_dimension(reduction: str, memory: Memory) -> None:
    inputs = draw(12, 5, 9, reduction=reduction, label_smoothing=0.1)
    inputs.hidden = inputs.hidden.contiguous().view(4, 3, 5).transpose(0, 1)
    inputs.target = inputs.target.view(4, 3).t()
    if reduction == "none":
        inputs.arriving = inputs.arriving.reshape(4, 3).t()

    seen = found(inputs, memory=memory)

    all_close(seen, truth(inputs))
    assert seen["loss"].shape == ((3, 4) if reduction == "none" else ())


@pytest.mark.unmeasured
@settings(deadline=None)
@given(needs=st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any), logits=st.sampled_from(WAYS))
def test_only_tensors_that_require_a_gradient_get_one(needs: tuple[bool, bool, bool], logits: Memory) -> None:
    inputs = draw(6, 3, 9, bias=True)
    true = truth(inputs)
    leaves = leaves_of(inputs)
    for leaf, wanted in zip(leaves.values(), needs, strict=True):
        leaf.requires_grad_(wanted)

    call(inputs, memory=logits).backward(inputs.arriving)

    for (name, leaf), wanted in zip(leaves.items(), needs, strict=True):
        close(leaf.grad, true[name] if wanted else None)


def test_a_loss_of_constants_requires_no_gradient() -> None:
    assert not call(draw(6, 3, 8, bias=True)).requires_grad


@pytest.mark.parametrize("memory", WAYS)
def test_a_retained_graph_can_be_gone_through_twice(memory: Memory) -> None:
    """Where logits were kept, the first time overwrites them, and the second computes them again."""
    inputs = draw(9, 4, 11, bias=True, softcap=2.0)
    true = truth(inputs)
    leaves = leaves_of(inputs)
    loss = call(inputs, memory=memory)

    for _ in range(2):
        slopes = torch.autograd.grad(loss, list(leaves.values()), inputs.arriving, retain_graph=True)
        all_close(dict(zip(leaves, slopes, strict=True)), {name: true[name] for name in leaves})


@pytest.mark.parametrize("memory", WAYS)
def test_parts_of_a_loss_that_is_kept_per_token_can_be_used_apart(memory: Memory) -> None:
    inputs = draw(9, 4, 11)
    leaves = leaves_of(inputs)

    losses = call(inputs, memory=memory)
    (2 * losses[:4].sum() - losses[6:].mean()).backward()

    inputs.arriving = torch.tensor([2.0] * 4 + [0.0] * 2 + [-1 / 3] * 3, dtype=torch.float64)
    expected = truth(inputs)
    for name, leaf in leaves.items():
        close(leaf.grad, expected[name])


def test_nothing_that_is_passed_in_is_changed() -> None:
    for memory in WAYS:
        inputs = draw(9, 3, 12, bias=True, class_weight=True, softcap=2.0, label_smoothing=0.1)
        tensors = [each for each in vars(inputs).values() if isinstance(each, torch.Tensor)]
        before = [tensor.clone() for tensor in tensors]

        found(inputs, memory=memory)

        assert len(tensors) == 6
        assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


@pytest.mark.parametrize("memory", WAYS)
@pytest.mark.parametrize("terms", [{}, {"label_smoothing": 0.1, "lse_square_scale": 0.01}, {"softcap": 3.0}])
def test_padding_with_infinite_logits_has_no_loss_and_gives_no_gradient(memory: Memory, terms: dict[str, Any]) -> None:
    inputs = draw(6, 3, 8, bias=True, **terms)
    true = truth(inputs)
    inputs.hidden = inputs.hidden.clone()
    inputs.hidden[1] = 1e308
    inputs.arriving = inputs.arriving.clone()
    inputs.arriving[1] = float("nan")

    seen = found(inputs, memory=memory)

    assert not (inputs.hidden @ inputs.weight.t())[1].isfinite().all()
    assert seen["loss"][1] == 0.0
    assert not seen["hidden"][1].any()
    all_close(seen, true)


@pytest.mark.parametrize("memory", WAYS)
def test_classes_that_pad_a_vocabulary_can_be_switched_off_by_an_infinite_bias(memory: Memory) -> None:
    """Two blocks of the four hold nothing else."""
    inputs = draw(7, 3, 16, bias=True)
    inputs.target = torch.where(inputs.alive, inputs.target % 8, inputs.target)
    assert inputs.bias is not None
    inputs.bias = inputs.bias.clone()
    inputs.bias[8:] = float("-inf")

    seen = found(inputs, memory=memory)

    cut = truth(replace(inputs, weight=inputs.weight[:8], bias=inputs.bias[:8]))
    close(seen["loss"], cut["loss"])
    close(seen["hidden"], cut["hidden"])
    for name in ("weight", "bias"):
        close(seen[name][:8], cut[name])
        assert not seen[name][8:].any()


def test_tokens_with_a_gradient_of_zero_contribute_nothing_with_huge_logits() -> None:
    """PyTorch gives NaN: 0 times an infinite slope."""
    inputs = draw(6, 3, 8)
    inputs.hidden = inputs.hidden.clone()
    inputs.hidden[0] = 1e308
    inputs.arriving = inputs.arriving.clone()
    inputs.arriving[0] = 0.0

    seen = found(inputs)

    assert not seen["hidden"][0].any()
    assert seen["weight"].isfinite().all()


@pytest.mark.parametrize("target", [8, 1000, -1])
def test_the_loss_of_a_target_outside_the_vocabulary_is_the_log_of_the_sum(target: int) -> None:
    inputs = draw(4, 3, 8)
    inputs.target[2] = target

    seen = found(inputs, memory=WAYS[0])

    leaf = inputs.hidden[2].detach().requires_grad_()
    expected = torch.logsumexp(leaf @ inputs.weight.detach().t(), dim=0)
    close(seen["loss"][2], expected.detach())
    close(seen["hidden"][2], torch.autograd.grad(expected, leaf, inputs.arriving[2])[0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_targets_may_be_any_integers(dtype: torch.dtype) -> None:
    inputs = draw(6, 3, 8, class_weight=True, ignore_index=7, reduction="mean")
    true = truth(inputs)
    inputs.target = inputs.target.to(dtype)

    all_close(found(inputs), true)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("more", [{}, {"lse_square_scale": 0.03}])
def test_a_class_that_wraps_to_the_ignore_index_is_a_class(reduction: str, more: dict[str, Any]) -> None:
    """In bytes -100 is 156, and a model of bytes has 256 classes."""
    inputs = draw(4, 3, 256, reduction=reduction, **more)
    inputs.target = torch.tensor([156, 1, 2, 255])
    true = truth(inputs)
    inputs.target = inputs.target.to(torch.uint8)

    all_close(found(inputs), true)


def test_a_copy_of_the_weight_counts_as_memory() -> None:
    """Autocast: float32 weights, bfloat16 products. A block is as narrow as its share of the copy makes it."""
    inputs = draw(16, 256, 32768, dtype=torch.float32)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        shapes = products(lambda: call(inputs, memory=Memory(extra_mib=1)))

    assert max(classes * 256 * 2 for _, classes in shapes) <= 1 << 20


@pytest.mark.parametrize("class_weight", [False, True])
def test_the_mean_over_no_token_is_nan_and_has_no_gradient_as_in_pytorch(class_weight: bool) -> None:
    inputs = draw(5, 3, 8, reduction="mean", class_weight=class_weight)
    inputs.target.fill_(IGNORED)
    leaf, weights = inputs.hidden.detach().requires_grad_(), inputs.class_weight
    plain = functional.cross_entropy(
        leaf @ inputs.weight.t(), inputs.target, None if weights is None else weights.double()
    )
    plain.backward()

    seen = found(inputs)

    assert plain.isnan()
    assert seen["loss"].isnan()
    assert leaf.grad is not None
    close(seen["hidden"], leaf.grad)
    assert not seen["weight"].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_adds_up_class_weights_of_half_precision_in_float32(dtype: torch.dtype) -> None:
    """300 of 300 are more than float16 holds."""
    inputs = draw(350, 3, 8, dtype=dtype, reduction="mean", class_weight=True)
    inputs.class_weight = torch.tensor([300.0, 301, 302, 303, 304, 305, 306, 307]).to(dtype)

    seen = found(inputs)

    close(seen["loss"], truth(inputs)["loss"], 1e-3)


# Dtypes


@pytest.mark.parametrize("memory", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_are_float32_and_gradients_have_the_dtype_of_their_tensors(dtype: torch.dtype, memory: Memory) -> None:
    inputs = draw(8, 4, 16, dtype=dtype, bias=True)
    assert inputs.bias is not None
    inputs.bias = inputs.bias.float()

    seen = found(inputs, memory=memory)

    assert [each.dtype for each in seen.values()] == [torch.float32, dtype, dtype, torch.float32]
    all_close(seen, truth(inputs), tolerance={torch.bfloat16: 0.03, torch.float16: 4e-3, torch.float32: 1e-5}[dtype])


@pytest.mark.parametrize("memory", WAYS)
@pytest.mark.parametrize("hidden", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", [torch.float32, torch.float16])
def test_autocast_takes_hidden_states_and_weights_of_different_dtypes(
    hidden: torch.dtype, weight: torch.dtype, memory: Memory
) -> None:
    inputs = draw(9, 4, 16)
    inputs.hidden, inputs.weight = inputs.hidden.to(hidden), inputs.weight.to(weight)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen = found(inputs, memory=memory)

    rounded = replace(inputs, hidden=inputs.hidden.bfloat16(), weight=inputs.weight.bfloat16())
    assert (seen["hidden"].dtype, seen["weight"].dtype) == (hidden, weight)
    all_close(seen, truth(rounded), tolerance=0.03)


def test_blocks_are_added_up_in_float32() -> None:
    """100 blocks of 4 classes each: a sum rounded to bfloat16 after each block would lose bits that float32 keeps."""
    inputs = draw(64, 8, 400, dtype=torch.bfloat16, seed=7)
    true = truth(inputs)

    def error(memory: Memory) -> float:
        seen = found(inputs, memory=memory)
        return float((seen["hidden"].double() - true["hidden"]).norm() / true["hidden"].norm())

    assert error(WAYS[0]) < 1.05 * error(Memory(block_classes=400)) < 0.01


@pytest.mark.parametrize("memory", WAYS)
def test_under_autocast_the_products_are_those_of_autocast(memory: Memory) -> None:
    inputs = draw(9, 4, 16, dtype=torch.float32, bias=True)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen = found(inputs, memory=memory)

    rounded = replace(inputs, hidden=inputs.hidden.bfloat16(), weight=inputs.weight.bfloat16())
    assert [each.dtype for each in seen.values()] == [torch.float32] * 4
    all_close(seen, truth(rounded), tolerance=0.03)
    exact = truth(inputs)["loss"]
    assert (seen["loss"] - exact).norm() > 1e-4  # so that the tolerance is not all there is


def test_a_backward_pass_outside_autocast_is_that_of_its_forward_pass() -> None:
    inputs = draw(9, 4, 16, dtype=torch.float32)
    leaves = leaves_of(inputs)

    def slopes(backward_outside: bool) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = call(inputs)
            if not backward_outside:
                return torch.autograd.grad(loss, list(leaves.values()), inputs.arriving)
        return torch.autograd.grad(loss, list(leaves.values()), inputs.arriving)

    assert all(map(torch.equal, slopes(backward_outside=True), slopes(backward_outside=False)))


def test_a_default_device_or_dtype_does_not_matter() -> None:
    inputs = draw(5, 3, 7, bias=True, class_weight=True, label_smoothing=0.1, reduction="mean", dtype=torch.float32)
    true = truth(inputs)
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float16)
    try:
        seen = found(inputs)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)

    assert {each.device.type for each in seen.values()} == {"cpu"}
    all_close(seen, true, tolerance=1e-5)


# Gradient accumulation


@pytest.mark.parametrize("memory", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_gradient_of_each_micro_batch_is_added_to_main_grad(memory: Memory, dtype: torch.dtype) -> None:
    main_grad = torch.full((11, 4), 0.25)
    address = main_grad.data_ptr()
    expected = main_grad.double()
    weight = draw(1, 4, 11, dtype=dtype).weight.requires_grad_()

    for seed in (1, 2):
        inputs = draw(9, 4, 11, seed=seed, dtype=dtype)
        inputs.hidden, inputs.weight = inputs.hidden.detach().requires_grad_(), weight
        call(inputs, main_grad=main_grad, memory=memory).backward(inputs.arriving)
        true = truth(inputs)
        close(inputs.hidden.grad, true["hidden"], 1e-5 if dtype == torch.float32 else 0.03)
        expected = expected + true["weight"]

    assert weight.grad is None
    assert main_grad.data_ptr() == address
    close(main_grad, expected, 1e-5 if dtype == torch.float32 else 0.03)


def test_main_grad_is_summed_without_rounding_to_the_dtype_of_the_weight() -> None:
    inputs = draw(9, 4, 11, dtype=torch.bfloat16)
    leaves_of(inputs)
    main_grad = torch.zeros(11, 4)

    call(inputs, main_grad=main_grad).backward(inputs.arriving)

    rounded = found(inputs)["weight"]
    assert torch.equal(main_grad.bfloat16(), rounded)
    assert not torch.equal(main_grad, rounded.float())


def test_a_frozen_weight_adds_nothing_to_main_grad() -> None:
    inputs = draw(9, 4, 11, dtype=torch.float32)
    leaves_of(inputs)["weight"].requires_grad_(False)
    main_grad = torch.zeros(11, 4)

    call(inputs, main_grad=main_grad).backward(inputs.arriving)

    assert not main_grad.any()


# The products


@pytest.mark.parametrize("memory", [Memory(), Memory(block_classes=9), Memory(logits="keep")])
def test_logits_that_are_one_block_are_computed_once(memory: Memory) -> None:
    inputs = draw(6, 4, 9)

    shapes = products(lambda: found(inputs, memory=memory))

    assert shapes == [(6, 9), (9, 4), (6, 4)]


def test_of_several_blocks_the_last_one_stays_and_the_others_are_computed_twice() -> None:
    inputs = draw(6, 4, 9)

    shapes = products(lambda: found(inputs, memory=Memory(block_classes=4)))

    forward = [(6, 1), (6, 4), (6, 4)]
    last, others = [(4, 4), (6, 4)], [(6, 1), (1, 4), (6, 4), (6, 4), (4, 4), (6, 4)]
    assert shapes == [*forward, *last, *others]


@pytest.mark.parametrize("logits", ["recompute", "keep"])
def test_tokens_without_a_label_are_left_out_of_the_products_and_then_those_without_a_gradient(logits: str) -> None:
    inputs = draw(9, 4, 7)
    inputs.arriving[:3] = 0.0
    left = int((inputs.alive[3:]).sum())
    blocks = 4 if logits == "recompute" else 0

    shapes = products(lambda: found(inputs, memory=Memory(logits=logits, block_classes=blocks, masked="skip")))

    last, others = [(4, 4), (left, 4)], [(left, 3), (3, 4), (left, 4)]
    labelled = int(inputs.alive.sum())
    assert (labelled, left) == (7, 5)
    if blocks:
        assert shapes == [(labelled, 3), (labelled, 4), *last, *others]
    else:
        assert shapes == [(labelled, 7), (7, 4), (left, 4)]


def test_an_evaluation_cuts_its_blocks_without_room_for_selected_tokens() -> None:
    inputs = draw(512, 256, 3000, dtype=torch.bfloat16)  # 3 MiB of logits; the sum and a copy take one

    def widest(memory: Memory) -> int:
        return max(columns for _, columns in products(lambda: call(inputs, memory=memory)))

    inputs.hidden.requires_grad_()
    trained = {way: widest(Memory(extra_mib=2, masked=way)) for way in ("compute", "skip")}
    with torch.no_grad():
        evaluated = {way: widest(Memory(extra_mib=2, masked=way)) for way in ("compute", "skip")}

    assert trained["skip"] < trained["compute"]
    assert set(evaluated.values()) == {trained["compute"]}


def test_a_frozen_leaf_saves_its_product() -> None:
    inputs = draw(6, 4, 9)
    leaves_of(inputs)["weight"].requires_grad_(False)

    shapes = products(lambda: call(inputs, memory=Memory(logits="keep")).backward(inputs.arriving))

    assert shapes == [(6, 9), (6, 4)]


@pytest.mark.parametrize("who", ["no leaf wants a gradient", "gradients are off", "inference mode"])
def test_logits_are_not_kept_without_a_backward_pass(who: str) -> None:
    inputs = draw(6, 4, 9)
    leaves_of(inputs)["weight"].requires_grad_(who != "no leaf wants a gradient")
    inputs.hidden.requires_grad_(who != "no leaf wants a gradient")
    mode = {"gradients are off": torch.no_grad, "inference mode": torch.inference_mode}.get(who, torch.enable_grad)
    memory = Memory(logits="keep", block_classes=5)

    with mode():
        shapes = products(lambda: call(inputs, memory=memory))

    assert shapes == [(6, 4), (6, 5)]


# Autograd


@pytest.mark.parametrize("memory", WAYS)
@pytest.mark.parametrize("name", ["hidden", "weight"])
def test_an_input_that_is_changed_between_the_passes_is_noticed(name: str, memory: Memory) -> None:
    inputs = draw(6, 4, 9)
    inputs.hidden = inputs.hidden.contiguous()
    leaves_of(inputs)
    loss = call(inputs, memory=memory)

    with torch.no_grad():
        getattr(inputs, name).add_(0)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(inputs.arriving)


@pytest.mark.parametrize("memory", WAYS)
@pytest.mark.parametrize("through_data", [False, True])
def test_targets_bias_and_class_weights_may_be_written_again_before_the_backward_pass(
    through_data: bool, memory: Memory
) -> None:
    """As where a static or prefetch buffer takes the next batch before the backward pass of the batch ahead of it."""
    inputs = draw(6, 4, 9, bias=True, class_weight=True, label_smoothing=0.1)
    inputs.target, inputs.bias = inputs.target.contiguous(), inputs.bias.contiguous()
    true = truth(inputs)
    leaves = leaves_of(inputs)
    loss = call(inputs, memory=memory)

    for buffer in (inputs.target, inputs.bias, inputs.class_weight):
        with torch.no_grad():
            (buffer.data if through_data else buffer).fill_(3)

    slopes = torch.autograd.grad(loss, list(leaves.values()), inputs.arriving)
    all_close(dict(zip(leaves, slopes, strict=True)), {name: true[name] for name in leaves})


@pytest.mark.parametrize("memory", WAYS)
@pytest.mark.parametrize("constant", ["hidden", "weight", "bias", "target", "class_weight"])
def test_inference_tensors_are_constants_like_any_other(constant: str, memory: Memory) -> None:
    """`save_for_backward` refuses them, which is why `torch.nn.functional.linear` does."""
    inputs = draw(6, 4, 9, bias=True, class_weight=True)
    true = truth(inputs)
    leaves = leaves_of(inputs)
    leaves.pop(constant, None)
    with torch.inference_mode():
        setattr(inputs, constant, getattr(inputs, constant).detach().clone())
    assert getattr(inputs, constant).is_inference()

    loss = call(inputs, memory=memory)
    for _ in range(2):
        slopes = torch.autograd.grad(loss, list(leaves.values()), inputs.arriving, retain_graph=True)
        all_close(dict(zip(leaves, slopes, strict=True)), {name: true[name] for name in leaves})


def test_a_second_derivative_is_refused() -> None:
    inputs = draw(6, 4, 9)
    leaves_of(inputs)
    arriving = inputs.arriving.double().requires_grad_()

    (slope,) = torch.autograd.grad(call(inputs), inputs.hidden, arriving, create_graph=True)

    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_a_second_derivative_in_the_inputs_alone_is_refused_too() -> None:
    inputs = draw(6, 4, 9, reduction="mean")
    leaves_of(inputs)

    (slope,) = torch.autograd.grad(call(inputs), inputs.hidden, create_graph=True)

    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(slope.sum(), inputs.hidden)


def test_a_step_that_is_repeated_gives_the_same_bits() -> None:
    for memory in WAYS:
        inputs = draw(33, 17, 50, dtype=torch.bfloat16, bias=True, label_smoothing=0.1)

        first, second = (found(inputs, memory=memory) for _ in range(2))

        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.full
@pytest.mark.unmeasured
@pytest.mark.parametrize("masked", ["compute", "skip"])
def test_a_compiled_step_gives_the_same_bits(masked: str) -> None:
    """Dynamo breaks the graph before the call, which then runs as it is."""
    inputs = draw(33, 17, 50, dtype=torch.float32, bias=True, label_smoothing=0.1)
    inputs.arriving[::3] = 0.0
    memory = Memory(block_classes=20, masked=masked)
    leaves = leaves_of(inputs)

    def step(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        losses = linear_cross_entropy(
            hidden, weight, inputs.target, bias=inputs.bias, reduction="none", label_smoothing=0.1, memory=memory
        )
        return (losses * inputs.arriving).sum()

    def outcome(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        loss = function(inputs.hidden * 2, inputs.weight)
        return [loss.detach(), *torch.autograd.grad(loss, list(leaves.values()))]

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo warns as it likes
        compiled = outcome(torch.compile(step, backend="eager"))

    assert all(map(torch.equal, compiled, outcome(step)))


# Arguments that do not fit


def fitting() -> dict[str, Any]:
    return {"hidden": torch.zeros(4, 3), "weight": torch.zeros(5, 3), "target": torch.zeros(4, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"hidden": torch.zeros(4, 2)},
            r"these shapes do not fit together: hidden \(4, 2\), weight \(5, 3\), target \(4,\)",
        ),
        ({"hidden": torch.zeros(3)}, r"do not fit together: hidden \(3,\)"),
        ({"hidden": torch.zeros(2, 2, 3)}, r"do not fit together: hidden \(2, 2, 3\)"),
        ({"hidden": torch.zeros(2, 1, 2, 3)}, r"do not fit together: hidden \(2, 1, 2, 3\)"),
        ({"weight": torch.zeros(3)}, r"do not fit together: hidden \(4, 3\), weight \(3,\)"),
        ({"target": torch.zeros((), dtype=torch.int64)}, r"do not fit together: .* target \(\)"),
        (
            {"target": torch.zeros(5, dtype=torch.int64)},
            r"one target for each of the tokens of 1 rank\(s\): hidden \(4, 3\), weight \(5, 3\), target \(5,\)",
        ),
        (
            {"hidden": torch.zeros(2, 3, 3), "target": torch.zeros(3, 2, dtype=torch.int64)},
            r"one target for each of the tokens of 1 rank\(s\): hidden \(2, 3, 3\)",
        ),
        ({"bias": torch.zeros(1)}, r"bias must be \(5,\): .* bias \(1,\)"),
        ({"class_weight": torch.zeros(4)}, r"class_weight must be \(5,\): .* class_weight \(4,\)"),
        ({"main_grad": torch.zeros(3, 5)}, r"main_grad must be \(5, 3\): .* main_grad \(3, 5\)"),
        ({"main_grad": torch.zeros(5, 3).half()}, "main_grad is torch.float16; it must be torch.float32"),
        ({"target": torch.zeros(4)}, "target is torch.float32; it must be an integer"),
        ({"target": torch.zeros(4, dtype=torch.bool)}, "target is torch.bool; it must be an integer"),
        (
            {"hidden": torch.zeros(4, 3).bfloat16()},
            "hidden is torch.bfloat16 and weight torch.float32; without autocast they must be the same",
        ),
        (
            {"bias": torch.zeros(5, device="meta")},
            "these tensors must be on one device: hidden on cpu, weight on cpu, target on cpu, bias on meta",
        ),
        ({"reduction": "batchmean"}, 'reduction is \'batchmean\'; it is one of "none", "sum", "mean"'),
    ],
)
def test_inconsistent_arguments_are_refused_with_the_reason(changed: dict[str, Any], reason: str) -> None:
    given_ = {**fitting(), **changed}

    with pytest.raises(ValueError, match=reason):
        linear_cross_entropy(**given_)


def test_consistent_arguments_are_accepted() -> None:
    assert linear_cross_entropy(**fitting()) == pytest.approx(torch.tensor(5.0).log().item())


# The passes that the overlays use


@pytest.mark.unmeasured
@settings(deadline=None)
@given(
    seed=st.integers(0, 2**31),
    terms=TERMS,
    class_weight=st.booleans(),
    needs=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    logits=st.sampled_from([torch.float64, None]),
    memory=st.sampled_from(WAYS),
)
def test_losses_can_be_scaled_by_the_probability_of_the_target(
    seed: int,
    terms: dict[str, Any],
    class_weight: bool,
    needs: tuple[bool, bool, bool],
    logits: torch.dtype | None,
    memory: Memory,
) -> None:
    """Liger's token scaling, where the probability counts as a constant; its z-loss is reported separately."""
    inputs = draw(9, 3, 8, seed=seed, bias=True, class_weight=class_weight, **terms)
    rows, alone = inputs.hidden.contiguous(), Group()
    layer = Layer(weight=inputs.weight, bias=inputs.bias, class_weight=inputs.class_weight, logits_dtype=logits)
    scaled = Terms(token_scaling=True, **terms)
    wanted = GradientRequest(hidden=needs[0], hidden_dtype=torch.float64, weight=needs[1], bias=needs[2])

    forward = forward_pass(rows, inputs.target, layer, scaled, alone, memory)
    slopes = backward_pass(
        inputs.arriving,
        rows,
        inputs.target,
        forward.statistics,
        layer,
        scaled,
        alone,
        memory,
        wanted,
        kept=forward.kept,
    )

    options: dict[str, Any] = {
        **terms,
        "label_smoothing": max(0.0, terms["label_smoothing"]),
        "ce_weight": None if inputs.class_weight is None else inputs.class_weight.double(),
        "bias": inputs.bias,
        "token_scaling": True,
    }
    losses, z_losses = reference.token_losses(inputs.hidden, inputs.weight, inputs.target, **options)
    close(forward.losses, losses)
    close(torch.zeros(9) if forward.z_losses is None else forward.z_losses, z_losses)
    expected = reference.gradients(inputs.hidden, inputs.weight, inputs.target, inputs.arriving, **options)
    for slope, true, need in zip(slopes, expected, needs, strict=True):
        close(slope, true if need else None)


def test_logits_may_be_wider_than_the_hidden_states() -> None:
    """A float32 block is turned into bfloat16 gradients in its own memory."""
    inputs = draw(9, 16, 40, dtype=torch.bfloat16, bias=True)
    rows = inputs.hidden.contiguous()
    layer = Layer(weight=inputs.weight, bias=inputs.bias, logits_dtype=torch.float32)
    terms, memory = Terms(), Memory(block_classes=13)

    forward = forward_pass(rows, inputs.target, layer, terms, Group(), memory)
    slopes = backward_pass(
        inputs.arriving, rows, inputs.target, forward.statistics, layer, terms, Group(), memory, GradientRequest()
    )

    true = truth(inputs)
    close(forward.losses, true["loss"], 1e-5)
    for slope, name in zip(slopes, ("hidden", "weight", "bias"), strict=True):
        close(slope, true[name], 0.02)


def test_a_label_that_lies_in_no_block_leaves_the_statistics_of_the_others_alone() -> None:
    inputs: Inputs = draw(5, 3, 8)
    inputs.target[:] = torch.tensor([0, 7, 8, -1, IGNORED])

    labels = forward_pass(
        inputs.hidden.contiguous(), inputs.target, Layer(weight=inputs.weight), Terms(), Group(), WAYS[0]
    ).statistics.label_logit

    logits = inputs.hidden @ inputs.weight.t()
    close(labels, torch.stack([logits[0, 0], logits[1, 7], *torch.zeros(3, dtype=torch.float64)]))
