"""The probe of layers that a recipe quantizes: trees without recipes."""

from __future__ import annotations

from probing import Texts, ask

from megacpp_overlays.feature_probes.quant_recipe_stale_weights import ENGINE, TARGET, probe
from megacpp_overlays.model import Verdict


def test_a_missing_target_is_absent() -> None:
    reads = {ENGINE: "class TEQuantizationParams: pass"}

    assert ask(probe, Texts({TARGET.module: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: "class Other: pass", **reads})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: "class MegatronModule: pass", **reads})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: "class MegatronModule: pass", ENGINE: None})).verdict is Verdict.ABSENT
