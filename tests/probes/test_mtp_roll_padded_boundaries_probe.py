"""The probe of the boundaries between which a packed row is rolled: releases and modules without any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from probing import Texts, ask, parsed_once

from megacpp_overlays.feature_probes.mtp_roll_padded_boundaries import TARGET, probe
from megacpp_overlays.model import Verdict

WITHOUT_PACKED_ROWS = ("0.12.0", "0.15.3")

Wheel = Callable[[str, str], Path]


@pytest.mark.parametrize("version", WITHOUT_PACKED_ROWS)
def test_releases_that_roll_no_packed_rows_are_absent(version: str, wheel: Wheel) -> None:
    finding = probe(parsed_once(wheel("megatron-core", version)))

    assert finding.verdict is Verdict.ABSENT
    assert finding.evidence[0].seen == "roll_tensor takes no packed rows"


def test_packed_rows_that_go_another_way_are_not_absent() -> None:
    one = "def roll_tensor(tensor, packed_seq_params=None):\n    return by_document(tensor, packed_seq_params)\n"
    other = (
        "def roll_tensor(tensor):\n    return tensor\n\n\ndef later(params):\n    return params.cu_seqlens_q_padded\n"
    )

    for text in (one, other):
        assert ask(probe, Texts({TARGET.module: text})).verdict is Verdict.UNRECOGNISED
