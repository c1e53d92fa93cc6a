"""Classes that `vocab_parallel_cross_entropy` smooths labels over: those of its own rank, or those of all.

`_VocabParallelCrossEntropy.forward` takes the number of classes, and the mean of their log-probabilities, from the rank's
part of the vocabulary. From 0.13.0 to 0.18.2 it does so in the group of the process, since 0.19.0
in the group that its caller may give (#5128). 0.12.3 and older were not tried. No tree has a repair.

The seam runs upstream's forward pass without smoothing, reads the saved tensors, and relies on its backward pass to take the
number of classes from the context.

The verdict rests on the function, its class, the helpers of both, the functions that return the rank and the number of ranks, and the
modules from which all these are imported.

Source: https://github.com/NVIDIA/Megatron-LM/issues/737
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

FORWARD = "_VocabParallelCrossEntropy.forward"
TARGET = Target(distribution="megatron-core", module="megatron.core.tensor_parallel.cross_entropy", symbol=FORWARD)
OWN_SHARE = "own-share"
OWN_SHARE_OF_A_GROUP = "own-share-of-a-group"


def probe(tree: SourceTree) -> Finding:
    """Return whether labels are smoothed over a rank's own share of the vocabulary."""
    return forms.finding("tp-label-smoothing", TARGET, tree)
