"""Run in a fresh interpreter, with Triton interpreted: print the errors of two ways through a pass, as JSON."""

from __future__ import annotations

import json
import sys
from unittest import mock

import nothing_cases
import torch
from linear_cross_entropy_cases import errors, found, truth
from two_paths_cases import TOKENS, labelled, memory_of, poisoned

from megacpp_overlays.kernels.vocabulary_softmax import in_triton

CASES = [(TOKENS, 0), (TOKENS, 200), (100, 50), (0, 0)]
"""Tokens with a label, and how many tokens have no gradient."""


def far(count: int, without_gradient: int) -> dict[str, float]:
    """Return the errors of a call with every term."""
    dtype = torch.float16
    inputs = labelled(
        count, dtype=dtype, bias=True, class_weight=True, label_smoothing=0.1, softcap=3.0, lse_square_scale=0.01
    )
    inputs.arriving = torch.where(torch.arange(TOKENS) < without_gradient, 0.0, inputs.arriving)
    # A program that finds nothing takes its time here, too.
    with poisoned() as ways, mock.patch.multiple(in_triton, _WARPS=8, _WARPS_OF_A_GROUP=8):
        seen = found(inputs, memory=memory_of(dtype))
    assert len(ways) == 2  # one for each pass
    return errors(seen, truth(inputs))


def main() -> None:
    """Answer."""
    report = {
        "whole": {f"{count}, {less}": far(count, less) for count, less in CASES},
        "nothing": nothing_cases.by_passes(in_triton),
    }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
