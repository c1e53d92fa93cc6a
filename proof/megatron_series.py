"""The distance of two series of losses of Megatron's launcher, and the limit of rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence

ROUNDING = 1e-3
"""Relative, of a loss: weights and activations are bfloat16, which has 2**-8, and a loss is a mean of many of them."""


def apart(these: Sequence[float], those: Sequence[float]) -> float:
    """Return the largest relative difference of two series; infinite where one is no number."""
    errors = [abs(this - that) / abs(that) for this, that in zip(these, those, strict=True)]
    return max(math.inf if math.isnan(error) else error for error in errors)
