"""Run in a fresh interpreter under TRITON_INTERPRET=1: results of the portable entry, as JSON. With `few`, fewer inputs are drawn.

Single facts with known numbers, and a comparison with float64 on inputs that hypothesis draws.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from portable_entry_cases import Case
from portable_entry_grid import BACKWARD_SPLIT, FORWARD_SPLIT, arrival, truth

from megacpp_overlays.kernels.linear_cross_entropy import entry
from megacpp_overlays.kernels.linear_cross_entropy import memory as linear_cross_entropy_memory
from megacpp_overlays.kernels.linear_cross_entropy import products as linear_cross_entropy_products
from megacpp_overlays.kernels.masked_products import products as bounded_products

# isort: split
from megatron.core.fusions import fused_linear_cross_entropy as upstream


def forward(hidden: Any, weight: Any, labels: Any, reduction: Any, ignore_index: int = -100) -> Any:
    return entry.forward_on_any_device(hidden, weight, labels, None, reduction, ignore_index, False)


def backward(arriving: Any, weight: Any, labels: Any, values: Any, reduction: Any, ignore_index: int = -100) -> Any:
    _, maximum, accumulate, valid, rank, ranks, hidden = values
    options = (reduction, ignore_index, None, rank, ranks, False)
    return entry.backward_on_any_device(arriving, hidden, weight, labels, maximum, accumulate, valid, *options)


def seven_values() -> dict[str, Any]:
    """Two classes, three tokens in three dimensions, the last one ignored."""
    hidden = torch.tensor([[[1.0]], [[0.0]], [[1.0]]])
    weight = torch.tensor([[0.0], [math.log(3)]])
    labels = torch.tensor([[0], [1], [-100]])
    found: dict[str, Any] = {}
    for reduction in ("none", "sum", "mean"):
        values = forward(hidden, weight, labels, reduction)
        found[reduction] = [
            [str(value.dtype), list(value.shape), value.tolist()] if isinstance(value, torch.Tensor) else value
            for value in values
        ]
        found[reduction][6] = values[6] is hidden
    return found


def mean_over_no_token() -> dict[str, list[Any]]:
    """For gradients that make the quotient infinite, NaN, and NaN from the start."""
    hidden, weight, labels = torch.ones(3, 2), torch.ones(4, 2), torch.full((3,), -100)
    found = {}
    for arriving in (1.0, 0.0, math.nan):
        values = forward(hidden, weight, labels, "mean")
        slopes = backward(torch.tensor(arriving), weight, labels, values, "mean")
        found[str(arriving)] = [bool(values[0].isnan()), *(each.tolist() for each in slopes)]
    return found


def gradients_that_arrive_at_an_ignored_token() -> dict[str, bool]:
    """Return whether NaN and infinity there give the same results as a gradient of 0."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator) for shape in ((4, 3), (5, 3)))
    labels = torch.tensor([0, -100, 4, -100])

    def slopes(odd: float) -> Any:
        arriving = torch.tensor([1.0, odd, -0.5, -odd])
        return backward(arriving, weight, labels, forward(hidden, weight, labels, "none"), "none")

    expected = slopes(0.0)
    return {
        str(odd): all(torch.equal(seen, true) for seen, true in zip(slopes(odd), expected, strict=True))
        and bool(expected[1].any())
        and not expected[0][1::2].any()
        for odd in (math.nan, math.inf)
    }


def infinite_logits_of_an_ignored_token() -> dict[str, bool]:
    hidden, weight = torch.tensor([[1.0, 0.0], [1e38, 0.0]]), torch.tensor([[1.0, 1.0], [1e3, 1.0]])
    labels = torch.tensor([0, -100])
    values = forward(hidden, weight, labels, "sum")
    for_hidden, for_weight = backward(torch.tensor(1.0), weight, labels, values, "sum")
    return {
        "its highest logit is infinite": bool(values[1][1].isinf()),
        "all else is finite": all(bool(each.isfinite().all()) for each in (values[0], for_hidden, for_weight)),
        "its own gradient is zero": not for_hidden[1].any(),
    }


def step(passes: int = 1, logits: str = "keep", packs: bool = False) -> tuple[list[int], list[Any]]:
    """Return the products of the forward pass and of some backward passes, and the last gradients."""
    core = SimpleNamespace(forward_func=entry.forward_on_any_device, backward_func=entry.backward_on_any_device)
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in ((6, 4), (9, 4))]
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved)
    counted = mock.Mock(wraps=linear_cross_entropy_products.product)
    with (
        mock.patch.object(upstream, "_get_platform", return_value=core),
        mock.patch.object(bounded_products, "product", counted),
        mock.patch.dict(os.environ, {FORWARD_SPLIT: "3", BACKWARD_SPLIT: "3"}),
        mock.patch.object(linear_cross_entropy_memory, "_chosen", linear_cross_entropy_memory.Memory(logits=logits)),
    ):
        with hooks if packs else contextlib.nullcontext():
            loss = upstream.linear_cross_entropy(*leaves, torch.arange(6), reduction="sum")
        forward_products = counted.call_count
        for _ in range(passes):
            found = torch.autograd.grad(loss, leaves, retain_graph=True)
    return [forward_products, counted.call_count - forward_products], list(found)


STEPS = {
    "kept": step,
    "computed again": lambda: step(logits="recompute"),
    "kept, second backward pass": lambda: step(passes=2),
    "kept, but saved tensors are packed": lambda: step(packs=True),
}


def products_of_a_step() -> dict[str, list[int]]:
    return {name: each()[0] for name, each in STEPS.items()}


def same_gradients_every_time() -> bool:
    found = [each()[1] for each in STEPS.values()]
    return all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-6) for each in found for a, b in zip(each, found[0], strict=True)
    )


# Without shrinking: in the interpreter that takes minutes, and the drawn example is small as it is.
@settings(deadline=None, max_examples=15 if "few" in sys.argv else 60, database=None, phases=[Phase.generate])
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 9),
    size=st.integers(1, 9),
    classes=st.integers(1, 40),
    splits=st.tuples(st.integers(0, 41), st.integers(0, 41)),
    reduction=st.sampled_from(["none", "sum", "mean"]),
    ignore_index=st.sampled_from([-100, 0, 2]),
    arrives=st.sampled_from(["random", "strided", "expanded", "zero first"]),
    data=st.data(),
)
def check_drawn_inputs(
    seed: int,
    tokens: int,
    size: int,
    classes: int,
    splits: tuple[int, int],
    reduction: Any,
    ignore_index: int,
    arrives: str,
    data: Any,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, size, generator=generator)
    weight = torch.randn(classes, size, generator=generator)
    drawn = st.one_of(st.just(ignore_index), st.integers(-3, classes + 3))
    labels = torch.tensor(data.draw(st.lists(drawn, min_size=tokens, max_size=tokens)), dtype=torch.int64)
    case = Case(reduction=reduction, ignore_index=ignore_index, arrives=arrives)
    arriving = arrival(case, tokens)

    with mock.patch.dict(os.environ, {FORWARD_SPLIT: str(splits[0]), BACKWARD_SPLIT: str(splits[1])}):
        values = forward(hidden, weight, labels, reduction, ignore_index)
        slopes = backward(arriving, weight, labels, values, reduction, ignore_index)

    loss, maximum, accumulate, valid = values[:4]
    assert int(valid) == int((labels != ignore_index).sum())
    close(maximum + accumulate.log(), torch.logsumexp(hidden.double() @ weight.double().t(), dim=1))
    if reduction == "mean" and not valid:
        assert loss.isnan()
        return
    for seen, true in zip((loss, *slopes), truth(case, hidden, weight, labels, arriving), strict=True):
        close(seen, true)


def close(seen: Any, true: Any) -> None:
    torch.testing.assert_close(seen.double(), true, rtol=1e-5, atol=1e-5)


def main() -> None:
    check_drawn_inputs()
    facts = (
        seven_values,
        mean_over_no_token,
        gradients_that_arrive_at_an_ignored_token,
        infinite_logits_of_an_ignored_token,
        products_of_a_step,
        same_gradients_every_time,
    )
    sys.stdout.write(json.dumps({fact.__name__: fact() for fact in facts}))


if __name__ == "__main__":
    main()
