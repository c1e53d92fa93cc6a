"""The dispatcher of Megatron's fused linear cross entropy, and which GPUs it knows.

`Platform.__init__` compares the major compute capability of the current device with numbers, takes the entry of that
branch, and raises `ValueError: Unsupported architecture` for any other.

    blackwell-only            10 alone: dev since 2025-12-05, core_dev_r0.16.0, the tags 26.04-alpha.rc1 and rc2
    blackwell-and-hopper      10, and 9 with an entry of upstream's own: the head of pull request 3345
    ABSENT                    every release and main; pull request 4312 has another module under that name

No tree has a repair, and none of the pull requests is recorded. The verdict rests on the whole module and on both functions of
the entry for Blackwell: the seam hands out an entry with the contract of upstream's own.

Source: https://github.com/NVIDIA/Megatron-LM/pull/2256 (dev) and https://github.com/NVIDIA/Megatron-LM/pull/3345 (a branch for 9).
"""

from __future__ import annotations

from megacpp_overlays.feature_probes import forms
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.trees import SourceTree

TARGET = Target(
    distribution="megatron-core",
    module="megatron.core.fusions.fused_linear_cross_entropy",
    symbol="Platform",
)
GETTER = "_get_platform"
FUNCTION = "LinearCrossEntropy"
ENTRIES = "megatron.core.fusions.linear_cross_entropy"

BLACKWELL_ONLY = "blackwell-only"
BLACKWELL_AND_HOPPER = "blackwell-and-hopper"

SERVED = frozenset({8, 9, 12})
"""Major compute capabilities that the portable entry serves: those for which all its parts are made."""

FORWARD = ("hidden", "weight", "labels", "tp_group", "reduction", "ignore_index", "sequence_parallel")
BACKWARD = (
    "dlogprobs",
    "global_hidden",
    "weight",
    "labels",
    "maximum",
    "accu",
    "num_valid_tokens",
    "reduction",
    "ignore_index",
    "tp_group",
    "tp_rank",
    "tp_world_size",
    "sequence_parallel",
)

_ABSENT_WITHOUT = {f"{TARGET.module}:{TARGET.symbol}": f"defines no {TARGET.symbol}"}


def probe(tree: SourceTree) -> Finding:
    """Return which major compute capabilities the dispatcher has no branch for."""
    return forms.finding("hopper-flce-dispatch", TARGET, tree, _ABSENT_WITHOUT)
