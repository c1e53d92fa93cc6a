"""Run in a fresh interpreter under TRITON_INTERPRET=1: facts about the results of the tensor-core kernels of pack 12, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import torch
from index_scores_cases import (
    LAYOUTS,
    LAYOUTS_OF_GRADIENT,
    ROUNDING,
    SPOILS,
    lay_out,
    lay_out_gradient,
    misplaced,
    random,
    roundings,
    spoil,
    whole,
)

from megacpp_overlays.kernels.index_scores import function as index_scores
from megacpp_overlays.kernels.index_scores import in_triton as index_scores_triton
from megacpp_overlays.kernels.index_scores import reference

NAMES = ("scores", "q", "weights", "k")
SIZES = {
    "odd": (65, 47, 1, 3, 80),
    "one of each": (1, 1, 1, 1, 16),
    "one head, several tiles": (140, 150, 1, 1, 64),
    "heads in three sums": (20, 30, 1, 67, 16),
    "two tiles a program, and one over": (1030, 20, 1, 2, 16),
    "few queries": (3, 140, 1, 2, 96),
    "few keys": (130, 3, 2, 2, 128),
    "dim 192": (17, 33, 1, 2, 192),
    "dim 256": (17, 33, 1, 2, 256),
    "dim 17": (20, 20, 3, 1, 17),
    "dim 1": (5, 6, 1, 2, 1),
}
if "few" in sys.argv:
    SIZES = {name: SIZES[name] for name in ("odd", "heads in three sums", "few queries", "dim 192", "dim 1")}
SMALL = (20, 30, 2, 3, 32)


def compute(grad: Any, q: Any, weights: Any, k: Any, use_relu: bool = True) -> tuple[torch.Tensor, ...]:
    return index_scores.scores(q, weights, k, use_relu), *index_scores.gradients(grad, q, weights, k, use_relu)


def wrong(found: Any, grad: Any, q: Any, weights: Any, k: Any, use_relu: bool = True) -> list[str]:
    """Return which results are not those of float64, or not of the right dtype and strides."""
    exact = [each.double() for each in (q, weights, k)]
    truths = (
        reference.scores(*exact, use_relu=use_relu),
        *reference.gradients(grad.double(), *exact, use_relu=use_relu),
    )
    dtypes = (torch.float32, q.dtype, weights.dtype, k.dtype)
    bad = []
    for name, seen, true, dtype in zip(NAMES, found, truths, dtypes, strict=True):
        margin = 2.0**-7 * true.abs() if dtype == torch.bfloat16 else 0.0 * true
        right = seen.dtype == dtype and seen.shape == true.shape and seen.is_contiguous()
        if not right or not bool(((seen.double() - true).abs() <= margin).all()):
            bad.append(name)
    return bad


def way() -> str:
    name: str = index_scores.implementation(torch.bfloat16, torch.bfloat16, 128, torch.device("cpu")).__name__
    return name


def whole_numbers() -> dict[str, list[str]]:
    found = {}
    for name, sizes in SIZES.items():
        q, weights, k, grad = whole(1, *sizes)
        found[name] = wrong(compute(grad, q, weights, k), grad, q, weights, k)
    for name in ("odd", "dim 192"):
        q, weights, k, grad = whole(1, *SIZES[name])
        found[f"{name}, no relu"] = wrong(compute(grad, q, weights, k, False), grad, q, weights, k, False)
    q, weights, k, grad = whole(2, *SMALL)
    for layout in LAYOUTS:
        given = lay_out(layout, q, weights, k)
        found[layout] = wrong(compute(grad, *given), grad, *given)
    for layout in LAYOUTS_OF_GRADIENT:
        above = lay_out_gradient(layout, grad)
        found[f"gradient: {layout}"] = wrong(compute(above, q, weights, k), above, q, weights, k)
    found["float32 weights"] = wrong(compute(grad, q, weights.float(), k), grad, q, weights.float(), k)
    return found


def random_numbers() -> dict[str, dict[str, float]]:
    found = {}
    for use_relu in (True, False):
        for name in ("odd", "dim 192"):
            q, weights, k, grad = random(3, *SIZES[name])
            results = compute(grad, q, weights.float(), k, use_relu)
            shares = roundings(results, grad, q, weights.float(), k, use_relu, ROUNDING[torch.float16], cut=True)
            found[f"{name}, relu {use_relu}"] = {what: share for what, (share, _) in shares.items()}
    return found


def parts() -> dict[str, list[str]]:
    q, weights, k, grad = whole(4, 140, 20, 1, 2, 16)
    found = {}
    for number in (1, 2, 3, 8):
        with mock.patch.object(index_scores_triton, "_parts", lambda *_, number=number: number):
            found[str(number)] = wrong(compute(grad, q, weights, k), grad, q, weights, k)
    return found


def empty() -> dict[str, list[str]]:
    found = {}
    for place, name in enumerate(("queries", "keys", "batch", "heads", "dim")):
        q, weights, k, grad = whole(5, *[0 if place == here else size for here, size in enumerate(SMALL)])
        try:
            found[name] = wrong(compute(grad, q, weights, k), grad, q, weights, k)
        except (ArithmeticError, RuntimeError) as error:
            found[name] = [repr(error)]
    return found


def spoilt_gradients() -> dict[str, dict[str, list[list[int]]]]:
    found = {}
    for name, spoilt in SPOILS.items():
        *how, use_relu = spoilt
        q, weights, k, grad = spoil(*how)[0]
        found[name] = misplaced(index_scores.gradients(grad, q, weights, k, use_relu), *spoilt)
    return found


def nan_in_the_scores() -> list[list[int]]:
    q, weights, k = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((3, 1, 2, 16), (3, 1, 2), (5, 1, 16)))
    q[1, 0, 0, 2] = float("nan")
    places: list[list[int]] = index_scores.scores(q, weights, k).isnan().nonzero().tolist()
    return places


def magnitudes() -> dict[str, list[str]]:
    """Powers of two change no digit, so whole numbers stay exact under them."""
    found = {}
    for name, of_grad, of_q, of_weights, of_k in (
        ("large gradient", 60, 0, 0, 0),
        ("small gradient", -60, 0, 0, 0),
        ("large queries, small keys", 0, 60, 0, -60),
        ("small queries, large weights", 0, -50, 50, 0),
        ("small everywhere", -20, -20, -20, -20),
    ):
        tensors = whole(7, *SMALL)
        q, weights, k, grad = (
            each * 2.0**power for each, power in zip(tensors, (of_q, of_weights, of_k, of_grad), strict=True)
        )
        found[name] = wrong(compute(grad, q, weights, k), grad, q, weights, k)
    for place, name in enumerate(("q", "weights", "k", "gradient")):
        tensors = whole(8, *SMALL)
        tensors[place].zero_()
        q, weights, k, grad = tensors
        found[f"{name} zero"] = wrong(compute(grad, q, weights, k), grad, q, weights, k)
    return found


def small_beside_large() -> float:
    """Return the relative error of the gradients of queries where a gradient a million times as large arrives elsewhere."""
    q, weights, k, grad = random(9, *SMALL)
    grad[:, 1:] *= 2.0**-20
    found = index_scores.gradients(grad, q, weights, k)[0][1:].double()
    true = reference.gradients(grad.double(), q.double(), weights.double(), k.double())[0][1:]
    return float((found - true).norm() / true.norm())


def same_digits_for_a_scaled_gradient() -> dict[str, list[bool]]:
    """Return by the power of two of all of a gradient which gradients have the digits that they have without it."""
    q, weights, k, grad = random(9, *SMALL)
    plain = index_scores.gradients(grad, q, weights, k)
    found = {}
    for power in (-60, 60):
        scaled = index_scores.gradients(grad * 2.0**power, q, weights, k)
        found[str(power)] = [torch.equal(one, other * 2.0**power) for one, other in zip(scaled, plain, strict=True)]
    return found


def same_digits_beside_a_large_tile() -> dict[str, list[bool]]:
    """Return whether gradients of queries and weights keep their digits where 64 rows get a 2**40 times larger gradient."""
    q, weights, k, grad = random(9, 140, 70, 1, 2, 32)
    plain = index_scores.gradients(grad, q, weights, k)[:2]
    found = {}
    for large in range(3):
        factor = torch.where(torch.arange(140) // 64 == large, 1.0, 2.0**-40)
        beside = index_scores.gradients(grad * factor[:, None], q, weights, k)[:2]
        found[f"tile {large}"] = [
            torch.equal(one.float(), other.float() * factor.view(-1, *[1] * (other.ndim - 1)))
            for one, other in zip(beside, plain, strict=True)
        ]
    return found


def cancellation() -> dict[str, float]:
    """Return the error of the gradient of queries as a multiple of that of a cut to bfloat16, by the size of the part that keys share.

    The gradient of a softmax adds up to 0 over keys, so their common part drops out, but not its rounding.
    """
    sizes = (64, 256, 1, 2, 32)
    q, weights, spread, logits = random(12, *sizes)
    common, target = random(62, 1, 1, 1, 1, sizes[-1])[2], random(13, *sizes)[3]
    weights = weights.abs().float()
    grad = (logits.softmax(dim=-1) - target.softmax(dim=-1)) / sizes[0]
    found = {}
    for times in (30, 300):
        k = (spread.double() + times * common.double()).bfloat16()
        for use_relu in (True, False):
            of_q = index_scores.gradients(grad, q, weights, k, use_relu)[0].double()
            true = reference.gradients(*[each.double() for each in (grad, q, weights, k)], use_relu=use_relu)[0]
            cut = (true.float().contiguous().view(torch.int32) & -(1 << 16)).view(torch.float32).double()
            found[f"{times} times, relu {use_relu}"] = float((of_q - true).norm() / (cut - true).norm())
    return found


def rerun() -> bool:
    q, weights, k, grad = random(6, *SMALL)
    first, second = (compute(grad, q, weights, k) for _ in range(2))
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


FACTS = (
    way,
    whole_numbers,
    random_numbers,
    parts,
    empty,
    spoilt_gradients,
    nan_in_the_scores,
    magnitudes,
    small_beside_large,
    same_digits_for_a_scaled_gradient,
    same_digits_beside_a_large_tile,
    cancellation,
    rerun,
)


def main() -> None:
    sys.stdout.write(json.dumps({fact.__name__: fact() for fact in FACTS}))


if __name__ == "__main__":
    main()
