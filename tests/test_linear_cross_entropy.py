"""The kernel of pack 09 against float64 autograd of its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_overlays.kernels import linear_cross_entropy_reference as reference
from megacpp_overlays.kernels.linear_cross_entropy import linear_cross_entropy_gradients

IGNORED = -100


def draw_inputs(seed: int, tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype = torch.float64) -> Any:
    """Return x, weight, target, grad_output and bias. The odd columns of storage keep strides from being trivial."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x, weight = values(tokens, 2 * hidden), values(hidden, vocabulary)
    target = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return x[:, ::2], weight.t(), target, values(2 * tokens)[::2], values(vocabulary)


def close(found: torch.Tensor | None, true: torch.Tensor | None, tolerance: float = 1e-9) -> None:
    assert (found is None) == (true is None)
    if found is not None and true is not None:
        torch.testing.assert_close(found.double(), true.double(), rtol=tolerance, atol=tolerance)


OPTIONS = st.fixed_dictionaries(
    {
        "lse_square_scale": st.sampled_from([0.0, 0.03]),
        "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
        "softcap": st.sampled_from([None, 0.7, 30.0]),
        "token_scaling": st.booleans(),
        "ignore_index": st.sampled_from([IGNORED, 0]),
    }
)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 17),
    hidden=st.integers(1, 9),
    vocabulary=st.integers(1, 23),
    ignored=st.sets(st.integers(0, 16)),
    arrives=st.sampled_from(["strided", "expanded", "zero first", "zero"]),
    with_bias=st.booleans(),
    ce_weight=st.sampled_from([None, "contiguous", "strided"]),
    options=OPTIONS,
)
def test_gradients_are_those_of_autograd(
    seed: int,
    tokens: int,
    hidden: int,
    vocabulary: int,
    ignored: set[int],
    arrives: str,
    with_bias: bool,
    ce_weight: str | None,
    options: dict[str, Any],
) -> None:
    x, weight, target, grad_output, bias = draw_inputs(seed, tokens, hidden, vocabulary)
    target[[place for place in ignored if place < tokens]] = options["ignore_index"]
    if arrives == "expanded":
        grad_output = torch.tensor(0.3, dtype=torch.float64).expand(tokens)
    elif arrives != "strided":
        grad_output = grad_output.clone()
        grad_output[: 1 if arrives == "zero first" else None] = 0.0
    named: dict[str, Any] = {"bias": bias if with_bias else None, **options}
    if ce_weight:
        weights = torch.arange(1, 2 * vocabulary + 1, dtype=torch.float64) / vocabulary
        named["ce_weight"] = weights[::2] if ce_weight == "strided" else weights[:vocabulary]

    found = linear_cross_entropy_gradients(x, weight, target, grad_output, **named)

    for gradient, true in zip(found, reference.gradients(x, weight, target, grad_output, **named), strict=True):
        close(gradient, true)


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), needs=st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_only_the_gradients_that_are_wanted_are_returned(seed: int, needs: tuple[bool, bool, bool]) -> None:
    x, weight, target, grad_output, bias = draw_inputs(seed, 6, 3, 8)

    found = linear_cross_entropy_gradients(x, weight, target, grad_output, bias=bias, needs=needs)

    true = reference.gradients(x, weight, target, grad_output, bias=bias)
    for gradient, expected, wanted in zip(found, true, needs, strict=True):
        close(gradient, expected if wanted else None)


def test_the_reference_is_the_cross_entropy_of_pytorch_when_no_option_is_used() -> None:
    x, weight, target, _, bias = draw_inputs(3, 5, 4, 7)

    loss, z_loss = reference.token_losses(x, weight, target, bias=bias)

    logits = x @ weight.t() + bias
    close(loss, -torch.log_softmax(logits, dim=1)[torch.arange(5), target])
    assert not z_loss.any()


def test_nothing_that_is_passed_in_is_changed() -> None:
    inputs = draw_inputs(1, 9, 3, 12)
    ce_weight = torch.rand(12, dtype=torch.float64)
    before = [tensor.clone() for tensor in (*inputs, ce_weight)]
    x, weight, target, grad_output, bias = inputs

    linear_cross_entropy_gradients(
        x, weight, target, grad_output, bias=bias, ce_weight=ce_weight, softcap=2.0, token_scaling=True
    )

    assert all(torch.equal(tensor, old) for tensor, old in zip((*inputs, ce_weight), before, strict=True))


def test_padding_with_infinite_logits_gives_no_gradient() -> None:
    x, weight, target, grad_output, _ = draw_inputs(2, 6, 3, 8)
    target[2] = IGNORED
    finite = linear_cross_entropy_gradients(x, weight, target, grad_output)
    x, grad_output = x.clone(), grad_output.clone()
    x[2] = 1e308
    grad_output[2] = float("nan")

    found = linear_cross_entropy_gradients(x, weight, target, grad_output)

    assert not (x @ weight.t())[2].isfinite().all()
    assert found[0] is not None
    assert not found[0][2].any()
    for gradient, expected in zip(found, finite, strict=True):
        close(gradient, expected)


def test_a_negative_smoothing_is_none_as_in_the_forward_kernel() -> None:
    x, weight, target, grad_output, _ = draw_inputs(4, 6, 3, 8)

    found = linear_cross_entropy_gradients(x, weight, target, grad_output, label_smoothing=-0.1)

    for gradient, true in zip(found, reference.gradients(x, weight, target, grad_output), strict=True):
        close(gradient, true)


def test_targets_may_be_32_bit_integers() -> None:
    x, weight, target, grad_output, _ = draw_inputs(5, 6, 3, 8)

    found = linear_cross_entropy_gradients(x, weight, target.to(torch.int32), grad_output)

    close(found[1], reference.gradients(x, weight, target, grad_output)[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_have_the_dtype_of_what_they_are_for(dtype: torch.dtype) -> None:
    x, weight, target, grad_output, bias = draw_inputs(6, 8, 4, 16, dtype)

    found = linear_cross_entropy_gradients(
        x, weight, target, grad_output.float(), bias=bias.float(), accum_dtype=torch.float64
    )

    assert [gradient.dtype for gradient in found if gradient is not None] == [dtype, dtype, torch.float32]


def test_chunks_are_added_up_in_the_accumulation_dtype() -> None:
    """160 chunks of one token each: bfloat16 loses what float32 keeps."""
    x, weight, target, grad_output, _ = draw_inputs(7, 160, 2, 400, torch.bfloat16)
    true = reference.gradients(x.double(), weight.double(), target, grad_output.double())[1]

    def error(accum_dtype: torch.dtype | None) -> float:
        found = linear_cross_entropy_gradients(x, weight, target, grad_output, accum_dtype=accum_dtype)[1]
        assert found is not None
        return float((found.double() - true).norm() / true.norm())

    assert error(torch.float32) < 0.8 * error(None) < 0.05


def test_under_autocast_the_products_are_those_of_the_forward_pass() -> None:
    x, weight, target, grad_output, bias = draw_inputs(8, 9, 4, 16, torch.float32)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_cross_entropy_gradients(x, weight, target, grad_output, bias=bias)

    rounded = [tensor.bfloat16().double() for tensor in (x, weight)]
    true = reference.gradients(*rounded, target, grad_output.double(), bias=bias.double())
    assert [gradient.dtype for gradient in found if gradient is not None] == [torch.float32] * 3
    for gradient, expected in zip(found, true, strict=True):
        close(gradient, expected, tolerance=0.05)


def test_a_default_device_or_dtype_does_not_matter() -> None:
    x, weight, target, grad_output, bias = draw_inputs(10, 5, 3, 7)
    torch.set_default_device("meta")
    try:
        found = linear_cross_entropy_gradients(x, weight, target, grad_output, bias=bias, token_scaling=True)
    finally:
        torch.set_default_device(None)

    assert [gradient.device.type for gradient in found if gradient is not None] == ["cpu"] * 3
