"""The probe for gathered logits that are taken for a share of the vocabulary: a class without the method."""

from __future__ import annotations

from probing import Texts, ask

from megacpp_overlays.feature_probes.gathered_logits_loss import TARGET, probe
from megacpp_overlays.model import Verdict


def test_a_class_that_inherits_the_method_is_not_absent() -> None:
    assert ask(probe, Texts({TARGET.module: "class LanguageModule: pass\n"})).verdict is Verdict.UNRECOGNISED
