"""Tensors of all queries, heads and keys that DSA's index scores, and the backward of its fused indexer loss, build.

Every release with DSA builds them, main and dev too. 0.16 has a method and leaves the backward to autograd. Since 0.17 a function
computes the scores, and the loss has a backward of its own that builds eleven tensors of that size against three in the forward; since
0.19 the relu is an option. Loss and backward build the main attention's scores, (batch, attention heads, queries, keys), as well. No
repair has been seen yet.

The verdict rests on the scores and on the backward, where the loss is replaced on the loss, on the function that chooses keys and on
all that these call, and since 0.19 on the autograd function of the loss. In dev of 2026-05-27 to 2026-07-22 and main of 2026-06-25 the
loss stays as it is; there the seam on the backward lets upstream's code work out the gradient of the scores and takes over where heads
come in, so it relies on the order inside.

Where `dsa_kernel_backend` names fused kernels, these may run instead (PR 5049 and PR 5099).

Source: https://github.com/NVIDIA/Megatron-LM/pull/5049 and https://github.com/NVIDIA/Megatron-LM/pull/5099
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

SCORES = "_compute_index_scores"
TARGET = Target("megatron-core", "megatron.core.transformer.experimental_attention_variant.dsa", SCORES)

FOUR_AXIS_METHOD = "four-axis-method"
FOUR_AXIS = "four-axis-functions"
FOUR_AXIS_OPTIONAL_RELU = "four-axis-functions-optional-relu"
SOFTENED_LOSS = "four-axis-functions-softened-loss"
EXACT_LOSS = "four-axis-functions-exact-loss"
EXACT_LOSS_EXTERNAL_MASS = "four-axis-functions-exact-loss-external-mass"


def probe(tree: SourceTree) -> Finding:
    """Return whether index scores, or their gradients, go through a tensor of (queries, batch, heads, keys)."""
    return forms.finding("dsa-indexer-streaming", TARGET, tree)
