"""Linear cross entropy: an output layer and its loss in one step, without the logits.

    from megacpp_overlays.kernels.linear_cross_entropy import linear_cross_entropy

torch is imported when a name is asked for, not by importing this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megacpp_overlays.kernels.linear_cross_entropy.function import Reduction, linear_cross_entropy

__all__ = ["Reduction", "linear_cross_entropy"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megacpp_overlays.kernels.linear_cross_entropy import function  # noqa: PLC0415 - imports torch

    return getattr(function, name)
