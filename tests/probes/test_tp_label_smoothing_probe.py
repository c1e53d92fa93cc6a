"""The probe of the classes over which labels are smoothed: modules of another kind."""

from __future__ import annotations

from probing import Texts, ask

from megacpp_overlays.feature_probes.tp_label_smoothing import TARGET, probe
from megacpp_overlays.model import Verdict

FUNCTION, ENTRY = "_VocabParallelCrossEntropy", "vocab_parallel_cross_entropy"


def test_a_module_that_goes_another_way_is_not_absent() -> None:
    one = f"def {ENTRY}(logits, target, label_smoothing=0.0):\n    return by_gathering(logits, target)\n"
    other = f"class {FUNCTION}:\n    @staticmethod\n    def forward(ctx, logits, target):\n        return logits\n"

    for text in (one, other, "class Other: pass"):
        assert ask(probe, Texts({TARGET.module: text})).verdict is Verdict.UNRECOGNISED
