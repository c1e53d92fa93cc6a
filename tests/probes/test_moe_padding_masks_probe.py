"""The probes of padding masks in a router and on pipeline stages: masks that go elsewhere."""

from __future__ import annotations

from types import ModuleType

import pytest
from probing import Texts, ask

from megacpp_overlays.feature_probes import expert_bias_padding_mask as counts
from megacpp_overlays.feature_probes import pipeline_padding_mask as stages
from megacpp_overlays.model import Verdict

FEATURES = (counts, stages)


@pytest.mark.parametrize("feature", FEATURES, ids=["counts", "stages"])
@pytest.mark.parametrize("text", [None, "class Other: pass", "class TopKRouter: pass\n\n\nclass GPTModel: pass"])
def test_a_missing_target_is_absent(feature: ModuleType, text: str | None) -> None:
    assert ask(feature.probe, Texts({feature.TARGET.module: text})).verdict is Verdict.ABSENT


@pytest.mark.parametrize("feature", FEATURES, ids=["counts", "stages"])
def test_a_mask_that_goes_elsewhere_is_not_absent(feature: ModuleType) -> None:
    for name, method in (("TopKRouter", "routing"), ("GPTModel", "forward")):
        text = f"class {name}:\n    def {method}(self, padding_mask):\n        return padding_mask\n"
        is_its_own = name == feature.TARGET.symbol.partition(".")[0]
        found = ask(feature.probe, Texts({feature.TARGET.module: text}))
        assert found.verdict is (Verdict.UNRECOGNISED if is_its_own else Verdict.ABSENT)
