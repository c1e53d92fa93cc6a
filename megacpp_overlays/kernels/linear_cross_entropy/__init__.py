"""Linear cross entropy: an output layer and its loss in one step, without the logits."""

from megacpp_overlays.kernels.linear_cross_entropy.function import Reduction, linear_cross_entropy

__all__ = ["Reduction", "linear_cross_entropy"]
