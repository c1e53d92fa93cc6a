"""Run in a fresh interpreter, with Triton interpreted: print how far losses over panels are from float64, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from linear_cross_entropy_cases import IGNORED, Inputs, draw, truth

from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory
from megacpp_overlays.kernels.linear_cross_entropy.parallel import Group, Layer, Terms, backward_pass, forward_pass
from megacpp_overlays.kernels.linear_cross_entropy.shard import GradientRequest

TOKENS, HIDDEN, CLASSES = 260, 8, 2 * 256 + 72
EVERY: dict[str, Any] = {"label_smoothing": 0.1, "softcap": 3.0}
ROUNDING = {torch.float32: 1e-5, torch.float16: 5e-3}

CASES = [
    (0, torch.float16, True, 0),
    (100, torch.float32, False, 0),
    (100, torch.float16, True, 0),
    (130, torch.float32, True, 2),
    (250, torch.float16, False, 0),
]
"""Labelled tokens, dtype, whether with every term of the loss, and panels that may share a block."""
FEW = CASES[3:4]
"""Every term, and panels that share a block."""


def labelled(count: int, dtype: torch.dtype, every: bool) -> Inputs:
    """Return a call that ignores all but so many tokens."""
    terms = EVERY if every else {}
    inputs = draw(TOKENS, HIDDEN, CLASSES, seed=count, dtype=dtype, bias=every, class_weight=every, **terms)
    inputs.target[torch.randperm(TOKENS, generator=torch.Generator().manual_seed(count))[count:]] = IGNORED
    inputs.hidden, inputs.weight = inputs.hidden.contiguous(), inputs.weight.contiguous()
    return inputs


def errors(count: int, dtype: torch.dtype, every: bool, panels: int) -> list[float]:
    """Return the errors of losses and gradients; logits are in float32, so that float16 gradients are narrowed in place."""
    inputs = labelled(count, dtype, every)
    layer = Layer(weight=inputs.weight, bias=inputs.bias, class_weight=inputs.class_weight, logits_dtype=torch.float32)
    terms, memory = Terms(**inputs.terms), Memory(block_classes=256, masked="skip", panels=panels)
    forward = forward_pass(inputs.hidden, inputs.target, layer, terms, Group(), memory)
    gradients = backward_pass(
        inputs.arriving, inputs.hidden, inputs.target, forward.statistics, layer, terms, Group(), memory,
        GradientRequest(hidden_dtype=torch.float32), kept=forward.kept,
    )  # fmt: skip
    seen = {"loss": forward.losses, **dict(zip(("hidden", "weight", "bias"), gradients, strict=True))}
    true = truth(inputs)
    return [float((seen[name].double() - true[name]).norm()) / (float(true[name].norm()) or 1.0) for name in true]


def main() -> None:
    """Answer."""
    found = {
        f"{count}, {dtype}{', every term' * every}, {panels}": {
            "errors": errors(count, dtype, every, panels), "rounding": ROUNDING[dtype]
        }
        for count, dtype, every, panels in (FEW if "few" in sys.argv else CASES)
    }  # fmt: skip
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
