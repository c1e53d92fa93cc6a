"""Probe the number of tokens by which `forward_step_calc_loss` divides the loss of a context parallel rank: its own, or that of all.

A loss function that returns a sum, a number of tokens and a report has its sum divided by that number. Since 0.13.0 the
launcher's counts the tokens of its own part of the sequence, and DDP then takes the mean over ranks.

The verdict rests on the division, the step that calls it, the callees of both, and on the constructor of DDP, which makes the mean.

Source: https://github.com/NVIDIA/Megatron-LM/issues/7452 (finding 9), https://github.com/NVIDIA/Megatron-LM/pull/7513
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

FUNCTION = "forward_step_calc_loss"
TARGET = Target(distribution="megatron-core", module="megatron.core.pipeline_parallel.schedules", symbol=FUNCTION)
OWN_COUNT = "own-count"
OWN_COUNT_WITHIN = "own-count-within-forward-step"

_ABSENT_WITHOUT = {f"{TARGET.module}#forward_step": "has no forward step"}


def probe(tree: SourceTree) -> Finding:
    """Return whether each context parallel rank's loss is divided by its own number of tokens."""
    return forms.finding("cp-local-loss-mean", TARGET, tree, _ABSENT_WITHOUT)
