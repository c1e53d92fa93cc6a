"""The probe for token counts of all ranks in place of one rank's: releases without the defect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from probing import parsed_once

from megacpp_overlays.feature_probes.masked_aux_loss_tokens import probe
from megacpp_overlays.model import Verdict

COUNTED_ONCE = ("0.16.0", "0.18.2")

Wheel = Callable[[str, str], Path]


@pytest.mark.parametrize("version", COUNTED_ONCE)
def test_releases_that_multiply_by_a_count_alone_are_absent(version: str, wheel: Wheel) -> None:
    finding = probe(parsed_once(wheel("megatron-core", version)))

    assert finding.verdict is Verdict.ABSENT
    assert "by a count alone" in finding.summary()
