"""Probe Megatron's language models for a loss that takes gathered logits for a rank's share of the vocabulary.

`parallel_output=False` and `runtime_gather_output=True` give each tensor parallel rank the logits of all classes. With labels those go
to a cross entropy over shares of the vocabulary, which counts all classes once for each rank, and looks for labels of other ranks at
the wrong places. Models have no such method up to 0.3.0, 0.4.0 to 0.13.1 were not read, and logits are taken for a share since 0.14.0. No
tree has a repair.

The verdict rests on the method, to which the seam gives a rank's part, and on the functions that split logits and gather their gradient.

Source: https://github.com/NVIDIA/Megatron-LM/issues/7452
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

CLASS = "LanguageModule"
METHOD = f"{CLASS}.compute_language_model_loss"
TARGET = Target("megatron-core", "megatron.core.models.common.language_module.language_module", METHOD)
TAKEN_FOR_A_SHARE = "taken-for-a-share"

_ABSENT_WITHOUT = {f"{TARGET.module}:{CLASS}": f"defines no {CLASS}"}


def probe(tree: SourceTree) -> Finding:
    """Return whether gathered logits are taken for a share."""
    return forms.finding("gathered-logits-loss", TARGET, tree, _ABSENT_WITHOUT)
