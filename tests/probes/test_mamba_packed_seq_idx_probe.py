"""The probe of the documents of a packed row in Megatron's Mamba mixer: releases of both kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from probing import parsed_once

from megacpp_overlays.feature_probes.mamba_packed_seq_idx import FROM_CALLER, probe
from megacpp_overlays.model import Proof, Verdict

Wheel = Callable[[str, str], Path]


@pytest.mark.parametrize(
    ("release", "verdict"),
    [
        ("0.16.0", Verdict.FIXED),
        ("0.16.1", Verdict.FIXED),
        ("0.17.0", Verdict.BROKEN),
        ("0.19.2", Verdict.BROKEN),
    ],
)
def test_releases_were_read_that_are_right_up_to_0_16(wheel: Wheel, release: str, verdict: Verdict) -> None:
    finding = probe(parsed_once(wheel("megatron-core", release)))

    assert finding.verdict is verdict
    assert finding.shape == (FROM_CALLER if verdict is Verdict.BROKEN else None)
    assert finding.proof is (Proof.READ if verdict is Verdict.FIXED else None)
