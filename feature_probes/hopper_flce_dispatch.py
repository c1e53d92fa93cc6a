"""The dispatcher of Megatron's fused linear cross entropy, and which GPUs it knows.

`Platform.__init__` compares the major compute capability of the current device with numbers, takes the entry of that
branch, and raises `ValueError: Unsupported architecture` for any other. No release has it, and main has not.

No tree has a repair, and none of the pull requests is recorded. The verdict rests on the whole module and on both functions of
the entry for Blackwell: the seam hands out an entry with the contract of upstream's own.

Source: https://github.com/NVIDIA/Megatron-LM/pull/2256 (dev) and https://github.com/NVIDIA/Megatron-LM/pull/3345 (a branch for 9).
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TARGET = Target("megatron-core", "megatron.core.fusions.fused_linear_cross_entropy", "Platform")
GETTER, FUNCTION = "_get_platform", "LinearCrossEntropy"
BLACKWELL_ONLY, BLACKWELL_AND_HOPPER = "blackwell-only", "blackwell-and-hopper"

_ABSENT_WITHOUT = {f"{TARGET.module}:{TARGET.symbol}": f"defines no {TARGET.symbol}"}


def probe(tree: SourceTree) -> Finding:
    """Return which major compute capabilities the dispatcher has no branch for."""
    return forms.finding("hopper-flce-dispatch", TARGET, tree, _ABSENT_WITHOUT)
