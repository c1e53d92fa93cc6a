"""The probe for calls that do not pass explicit groups on: a helper without callers."""

from __future__ import annotations

import pytest
from edited_code import archive
from probing import Texts, ask
from releases import newest

from megacpp_overlays.feature_probes import explicit_tp_groups as feature
from megacpp_overlays.model import Verdict

pytestmark = pytest.mark.upstream

CALLERS = (
    feature.CROSS,
    feature.LATENT,
    feature.LLAVA,
    feature.PREDICTION,
    feature.LAYERS,
    feature.OLD_LAYERS,
    feature.CHECKPOINT,
)
NEWEST = newest()


def test_the_helper_is_left_alone_where_nothing_hands_work_on_without_a_group() -> None:
    modules = {each.module: None for each in CALLERS}

    assert ask(feature.probe, Texts(modules, archive(f"megatron_core-{NEWEST}"))).verdict is Verdict.ABSENT
