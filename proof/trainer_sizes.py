"""Sizes of the Trainer's model on a CPU and on a GPU, and the tolerance for equality there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from processes import ON_CPU

BITS = 0.0


@dataclass(frozen=True)
class Near:
    """Relative differences, over all steps, that are still called the same."""

    losses: float
    norms: float
    repeated: float
    """Between two launches that compute the same thing."""


NEAR = {
    # fp32 kernels that add in another order differ by less, the defect by a thousand times more; one thread repeats bits.
    "cpu": Near(losses=1e-4, norms=1e-4, repeated=BITS),
    # bfloat16 has 2**-8, and each step begins with the rounding of those before; the defect is ten times larger still.
    "gpu": Near(losses=1e-2, norms=5e-2, repeated=5e-2),
}
"""By the host of the receipts."""


@dataclass(frozen=True)
class Sizes:
    """A model and its batches, as words for the launcher, and where it is trained."""

    host: str
    says: str
    """The words of the page about it."""
    words: tuple[str, ...]
    steps: int
    env: Mapping[str, str]


def sizes(*, on_gpu: bool, quick: bool) -> Sizes:
    """Return the sizes of the model for the first GPU; without `on_gpu` for a CPU, even on a host with GPUs."""
    if not on_gpu:
        says = "fp32, one thread, Triton's interpreter"
        return Sizes("cpu", says, (), 8 if quick else 30, ON_CPU)
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]  # with several it would be another Trainer
    return Sizes(
        host="gpu",
        says="16 layers of 2048 channels, 32768 classes, 8 rows of 1024 tokens, bfloat16",
        words=(
            *("--dtype", "bfloat16", "--layers", "16", "--hidden", "2048", "--heads", "16", "--vocabulary", "32768"),
            *("--rows", "8", "--tokens", "1024", "--rate", "3e-4"),
        ),
        steps=8 if quick else 20,
        env={"CUDA_VISIBLE_DEVICES": first, "HF_HUB_OFFLINE": "1"},
    )
