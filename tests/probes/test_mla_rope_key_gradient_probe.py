"""The probe of the heads that shared rotary keys of MLA learn from: keys from elsewhere."""

from __future__ import annotations

from probing import Texts, ask

from megacpp_overlays.feature_probes.mla_rope_key_gradient import TARGET, probe
from megacpp_overlays.model import Verdict


def test_an_attention_that_takes_its_keys_from_elsewhere_is_not_absent() -> None:
    text = "class MLASelfAttention(MultiLatentAttention):\n    def forward(self): ...\n"

    assert ask(probe, Texts({TARGET.module: text})).verdict is Verdict.UNRECOGNISED
