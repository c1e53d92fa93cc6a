"""The probe of MoE layers of a prediction and of their z-loss: stacks and routers of another kind."""

from __future__ import annotations

import pytest
from probing import Texts, ask

from megacpp_overlays.feature_probes import hybrid_mtp_aux_loss as stacks
from megacpp_overlays.feature_probes import mtp_z_loss as divided
from megacpp_overlays.model import Verdict


@pytest.mark.parametrize(
    ("feature", "text"),
    [
        (stacks, "class HybridStack:\n    pass\n"),
        (stacks, "class HybridStack:\n    def __init__(self, config):\n        self.layers = made(config)\n"),
        (
            divided,
            "class TopKRouter:\n    def apply_z_loss(self, logits):\n        return logits\n\n    def routing(self):\n"
            "        return self.config.mtp_use_repeated_layer\n",
        ),
        (
            divided,
            "class TopKRouter:\n    def apply_z_loss(self, logits):\n        if self.config.mtp_use_repeated_layer:\n"
            "            logits = logits / self.config.mtp_num_layers\n        return logits\n",
        ),
    ],
    ids=[
        "no constructor",
        "made elsewhere",
        "asked elsewhere",
        "attached elsewhere",
    ],
)
def test_an_unknown_form_is_not_recognised(feature: object, text: str) -> None:
    probe, module = feature.probe, feature.TARGET.module  # type: ignore[attr-defined]

    assert ask(probe, Texts({module: text})).verdict is Verdict.UNRECOGNISED


def test_an_older_module_that_knows_layers_of_a_prediction_is_not_absent() -> None:
    texts = {
        stacks.TARGET.module: None,
        "megatron.core.ssm.mamba_block": "class MambaStack:\n    is_mtp_layer = False\n",
    }

    assert ask(stacks.probe, Texts(texts)).verdict is Verdict.UNRECOGNISED
