"""Probe Liger's kernels of a GLM-4V model that exists, whose norms write in place into gradients that residuals share."""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

FUNCTION = "apply_liger_kernel_to_glm4v"
TARGET = Target("liger-kernel", "liger_kernel.transformers.monkey_patch", "_patch_rms_norm_module")
IN_PLACE = "in-place"


def probe(tree: SourceTree) -> Finding:
    """Return whether norms before a sum write in place."""
    without = {f"{TARGET.module}:{FUNCTION}": f"there is no {FUNCTION}"}
    return forms.finding("liger-glm4v-norms", TARGET, tree, without)
