"""The probes of the marks of attention sinks: trees without sinks, and attention from elsewhere."""

from __future__ import annotations

import pytest
from probing import Texts, ask

from megacpp_overlays.feature_probes.tp_attention_sinks import CORE, LATENT_TARGET, TARGET, probe, probe_latent
from megacpp_overlays.model import Verdict


def test_a_missing_target_is_absent() -> None:
    kind = "class {}Attention:\n    def __init__(self): pass\n"
    attention = kind.format("Self") + kind.format("Cross")
    assert ask(probe, Texts({TARGET.module: None, CORE: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: "class Other: pass", CORE: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: attention, CORE: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: attention, CORE: "class Other: pass"})).verdict is Verdict.ABSENT


@pytest.mark.parametrize(
    "text",
    [
        "from vendor import SelfAttention\n",
        "from vendor import *\n",
        "class SelfAttention: pass\nclass CrossAttention: pass\n",
    ],
)
def test_a_name_that_is_imported_from_elsewhere_is_not_absent(text: str) -> None:
    assert ask(probe, Texts({TARGET.module: text, CORE: "softmax_offset = None"})).verdict is Verdict.UNRECOGNISED


def test_without_latent_attention_or_sinks_there_is_nothing_to_mark() -> None:
    latent = "class MultiLatentAttention:\n    def __init__(self): pass\n"
    for texts in (
        {LATENT_TARGET.module: None, CORE: "softmax_offset = None"},
        {LATENT_TARGET.module: "class Other: pass", CORE: "softmax_offset = None"},
        {LATENT_TARGET.module: latent, CORE: None},
        {LATENT_TARGET.module: latent, CORE: "class Other: pass"},
    ):
        assert ask(probe_latent, Texts(texts)).verdict is Verdict.ABSENT


@pytest.mark.parametrize(
    "text",
    ["from vendor import MultiLatentAttention\n", "from vendor import *\n", "class MultiLatentAttention: pass\n"],
)
def test_a_latent_attention_from_elsewhere_is_not_absent(text: str) -> None:
    texts = {LATENT_TARGET.module: text, CORE: "softmax_offset = None"}

    assert ask(probe_latent, Texts(texts)).verdict is Verdict.UNRECOGNISED
