"""Probe torch's distributed checkpoints for state that asking for the state of an optimizer before its first step leaves behind.

`_init_optim_state` takes a step with gradients and learning rates of zero to make state. Counters count it, and a coupled weight decay goes into moments.

Source: https://github.com/pytorch/torchtitan/pull/4382, which repairs a copy of it
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TARGET = Target("torch", "torch.distributed.checkpoint.state_dict", "_init_optim_state")
STEPPED = "counts-the-step-that-makes-state"


def probe(tree: SourceTree) -> Finding:
    """Return whether state is that of an optimizer that has taken a step."""
    return forms.finding("dcp-fresh-optimizer-state", TARGET, tree)
