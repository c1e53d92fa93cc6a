"""Run in a fresh interpreter under TRITON_INTERPRET=1: how far the Triton passes are from float64, as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import product
from unittest import mock

import torch
from linear_cross_entropy_cases import IGNORED, errors, found
from linear_cross_entropy_cases import draw as draw_loss
from linear_cross_entropy_cases import truth as truth_of_loss
from vocabulary_softmax_cases import CASES, EXTRAS, FEW, TOKENS, Block, Case, draw, run, spoil, truth

from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory
from megacpp_overlays.kernels.vocabulary_softmax import in_torch as vocabulary_softmax_torch
from megacpp_overlays.kernels.vocabulary_softmax import in_triton as vocabulary_softmax_triton
from megacpp_overlays.kernels.vocabulary_softmax import passes as public
from megacpp_overlays.kernels.vocabulary_softmax.numbers import Statistics

EVERY = {"bias": True, "class_weight": True, "label_smoothing": 0.1, "softcap": 3.0, "lse_square_scale": 0.01}


def compare(case: Case, block: Block) -> dict[str, float]:
    """Return the error of each result where it is finite, in the Euclidean norm, relative."""
    seen, true = run(case, block, vocabulary_softmax_triton), truth(case, block)
    far: dict[str, float] = {"a dead row": float(seen["gradient"][2:3].abs().sum())}
    for name, each in true.items():
        assert seen[name].shape == each.shape
        finite = each.isfinite()
        size = float(each[finite].norm()) or 1.0
        far[name] = float((seen[name].double() - each)[finite].norm()) / size
    return far


def few_programs(name: str) -> dict[str, float]:
    """Return the result of `compare` where a program has several rows to go through."""
    with mock.patch.object(vocabulary_softmax_triton, "_WARPS", 2):
        return compare(CASES[name], draw(CASES[name]))


def numbers_of_tokens(tokens: int) -> dict[str, float]:
    """Return the largest differences between the passes that have one number a token and those in PyTorch."""
    generator = torch.Generator().manual_seed(tokens)
    values = torch.randn(5, tokens, generator=generator)
    statistics = Statistics(values[0], values[1].exp(), values[2])
    far = {}
    for dtype in (torch.int64, torch.int32):
        labels = torch.randint(0, 4, (tokens,), generator=generator).to(dtype)
        spoiled = statistics._replace(maximum=torch.where(labels == 2, float("inf"), values[0]))
        arriving = {
            "contiguous": values[3],
            "strided": values[3:].t()[:, 0],
            "expanded": values[3][:1].expand(tokens),
            "float64": values[3].double(),
            "NaN where ignored": torch.where(labels == 2, float("nan"), values[3]),
        }
        ours, theirs = (
            each.plain_losses(spoiled, labels, 2) for each in (vocabulary_softmax_triton, vocabulary_softmax_torch)
        )
        far[f"losses, {dtype}"] = float((ours - theirs).abs().sum())
        for name, gradient in arriving.items():
            one, other = (
                each.plain_coefficients(statistics, labels, 2, gradient)
                for each in (vocabulary_softmax_triton, vocabulary_softmax_torch)
            )
            far[f"coefficients, {dtype}, {name}"] = sum(
                float((a - b).abs().sum()) for a, b in zip(one, other, strict=True)
            )
    return far


def whole() -> dict[str, dict[str, float]]:
    """Return the errors of the public function, which must have gone through Triton."""
    assert public._passes(torch.zeros(1)) is vocabulary_softmax_triton
    assert public._passes(torch.zeros(1, dtype=torch.float64)) is vocabulary_softmax_torch
    far = {}
    for name, options in {"plain": {}, "every option": EVERY}.items():
        for way, memory in {"blocks": Memory(block_classes=130), "keep": Memory(logits="keep")}.items():
            for reduction, masked in product(("none", "mean"), ("compute", "skip")):
                inputs = draw_loss(12, 20, 401, dtype=torch.float32, reduction=reduction, **options)
                inputs.target[3:9] = IGNORED
                seen = found(inputs, memory=replace(memory, masked=masked))
                far[f"{name}, {way}, {reduction}, {masked}"] = errors(seen, truth_of_loss(inputs))
    return far


def main() -> None:
    """Answer everything."""
    cases = {name: case for name, case in CASES.items() if name in FEW or "few" not in sys.argv}
    report = {
        "cases": {name: compare(case, draw(case)) for name, case in cases.items()},
        "few programs": {name: few_programs(name) for name, case in cases.items() if case.selected is not None},
        "extras": {name: compare(*spoil(name)) for name in EXTRAS},
        "tokens": {str(tokens): numbers_of_tokens(tokens) for tokens in TOKENS},
        "whole": whole(),
    }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
