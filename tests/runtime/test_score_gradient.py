"""Gradients read from the products of a backward with proxies; anything else that the backward does is an error."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacpp_overlays.runtime.score_gradient import BackwardTrace, ProxyTensor, true_tensors

Q, WEIGHTS, K = torch.ones(5, 2, 3, 4), torch.ones(5, 2, 3), torch.ones(6, 2, 4, dtype=torch.bfloat16)
GRADIENT = torch.arange(60.0).view(5, 2, 1, 6)


def known(q: Any, weights: Any, k: Any, rectify: bool = True, gradient: Any = GRADIENT) -> tuple[Any, ...]:
    """Spread a gradient as every known backward does."""
    products = torch.einsum("sbhd,tbd->sbht", q.float(), k.float())
    passed = products > 0
    if rectify:
        products = torch.relu(products)
    of_weights = (gradient * products).sum(dim=-1)
    gradient = gradient * weights.unsqueeze(-1)
    if rectify:
        gradient = gradient * passed.float()
    of_q = torch.einsum("sbht,tbd->sbhd", gradient, k.float())
    of_k = torch.einsum("sbht,sbhd->tbd", gradient, q.float())
    return of_q.to(q.dtype), of_weights.to(weights.dtype), of_k.to(k.dtype)


def ask(backward: Callable[..., Any] = known, **given: Any) -> BackwardTrace:
    trace = BackwardTrace(Q, WEIGHTS, K, "look elsewhere")
    trace.returned = backward(*trace.proxies(), **given)  # type: ignore[attr-defined]
    return trace


def answer(backward: Callable[..., Any] = known, **given: Any) -> Any:
    trace = ask(backward, **given)
    return trace.gradient(trace.returned)  # type: ignore[attr-defined]


def test_the_gradient_is_the_multiplied_tensor_as_a_view() -> None:
    found = answer()

    assert found.shape == (2, 5, 6)
    assert found.data_ptr() == GRADIENT.data_ptr()
    assert torch.equal(found.transpose(0, 1).unsqueeze(2), GRADIENT)


@pytest.mark.parametrize("rectify", [True, False])
def test_a_relu_is_noticed(rectify: bool) -> None:
    assert ask(rectify=rectify).rectified is rectify


def test_unknowns_answer_for_device_and_dtype_of_their_tensors() -> None:
    proxies = BackwardTrace(Q, WEIGHTS, K, "").proxies()

    assert [each.dtype for each in proxies] == [torch.float32, torch.float32, torch.bfloat16]
    assert {each.device for each in proxies} == {Q.device}


def test_the_score_function_gets_the_true_tensors_and_others_pass() -> None:
    trace = BackwardTrace(Q, WEIGHTS, K, "")

    assert true_tensors(*trace.proxies()) is trace.tensors
    assert true_tensors(Q, WEIGHTS, K) == (Q, WEIGHTS, K)


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0), (0, 0, 0), (1, 1, 2)])
def test_the_score_function_refuses_another_order(order: tuple[int, int, int]) -> None:
    proxies = BackwardTrace(Q, WEIGHTS, K, "look elsewhere").proxies()

    with pytest.raises(RuntimeError, match="it swaps its inputs: look elsewhere"):
        true_tensors(*(proxies[place] for place in order))


def test_the_score_function_refuses_a_mix() -> None:
    first, *_ = BackwardTrace(Q, WEIGHTS, K, "look elsewhere").proxies()

    with pytest.raises(RuntimeError, match="it swaps its inputs"):
        true_tensors(first, WEIGHTS, K)


def other(q: Any, weights: Any, k: Any, how: str) -> Any:
    """Do something that no known backward does."""
    of_q, of_weights, of_k = known(q, weights, k)
    match how:
        case "two results":
            return of_q, of_weights
        case "a list":
            return [of_q, of_weights, of_k]
        case "a tensor":
            return GRADIENT, of_weights, of_k
        case "a third product":
            GRADIENT * q
        case "a division":
            GRADIENT / q
        case "another function":
            torch.exp(q)
        case "another method":
            q.abs()
        case "a tensor from the right":
            q * GRADIENT
        case "a sum":
            GRADIENT + q
    return of_q, of_weights, of_k


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("two results", "it did not return three gradients of its inputs"),
        ("a list", "it did not return three gradients of its inputs"),
        ("a tensor", "it did not return three gradients of its inputs"),
        ("a third product", "it did not multiply one gradient with products and weights"),
        ("a division", "it calls div with its inputs"),
        ("another function", "it calls exp with its inputs"),
        ("another method", "it asks its inputs for abs"),
        ("a tensor from the right", "it did not multiply one gradient|it calls"),
        ("a sum", "it calls add with its inputs"),
    ],
)
def test_every_other_operation_is_an_error_with_a_way_out(how: str, says: str) -> None:
    with pytest.raises((RuntimeError, AttributeError), match=f"({says}).*: look elsewhere"):
        answer(other, how=how)


def test_products_with_two_gradients_are_refused() -> None:
    def two(q: Any, weights: Any, k: Any) -> Any:
        (GRADIENT * 2.0) * weights
        return GRADIENT * q, weights, k

    with pytest.raises(
        RuntimeError, match="it did not multiply one gradient with products and weights: look elsewhere"
    ):
        answer(two)


def test_nothing_multiplied_is_refused() -> None:
    with pytest.raises(RuntimeError, match="it did not multiply one gradient with products and weights"):
        answer(lambda q, weights, k: (q, weights, k))


def test_a_gradient_of_another_shape_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"its gradient is \(5, 2, 3, 6\) and not \(5, 2, 1, 6\)"):
        answer(gradient=GRADIENT.expand(5, 2, 3, 6))


def test_tensors_are_free_once_the_question_is_gone() -> None:
    gc.disable()
    try:
        q = torch.ones(5, 2, 3, 4)
        trace = BackwardTrace(q, WEIGHTS, K, "")
        gradient = torch.ones(5, 2, 1, 6)
        trace.gradient(known(*trace.proxies(), gradient=gradient))
        held = [weakref.ref(each) for each in (q, gradient)]
        del q, gradient, trace

        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()


def test_an_unknown_attribute_is_missing() -> None:
    proxy = BackwardTrace(Q, WEIGHTS, K, "").proxies()[0]

    assert isinstance(proxy, ProxyTensor)
    assert not hasattr(proxy, "shape")
