"""Former name of `megacpp_overlays.kernels.mamba3.mimo_reference`, which reproducers with kept receipts import."""

from megacpp_overlays.kernels.mamba3.mimo_reference import *  # noqa: F403 - whatever is public there
