"""Probe torch's `loss_parallel`, under which the backward pass of every `log_softmax` is the identity.

The backward pass of `nll_loss` has the gradient of both, so that cross entropy alone is right. Verdicts rest on both passes and on the table that installs them.

Source: https://github.com/pytorch/pytorch/issues/190746
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TARGET = Target("torch", "torch.distributed.tensor.parallel.loss", "_enable_custom_loss_ops")
FUSED = "_nll_loss_and_log_softmax_backward"
IDENTITY = "identity"


def probe(tree: SourceTree) -> Finding:
    """Return whether gradients of `log_softmax` pass as they come."""
    return forms.finding("loss-parallel-log-softmax", TARGET, tree)
