"""Probe torch's distributed checkpoints for optimizer state of frozen parameters that loading drops.

`_split_optim_state_dict` and `_unflatten_optim_state_dict` take state from a checkpoint where a parameter requires a gradient at that moment. Plain `load_state_dict` of an optimizer takes all.

Source: https://github.com/pytorch/pytorch/issues/192202
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TARGET = Target("torch", "torch.distributed.checkpoint.state_dict", "_load_optim_state_dict")
DROPPED = "takes-state-of-what-requires-a-gradient"


def probe(tree: SourceTree) -> Finding:
    """Return whether state of parameters that are frozen at load is dropped."""
    return forms.finding("dcp-frozen-optimizer-state", TARGET, tree)
