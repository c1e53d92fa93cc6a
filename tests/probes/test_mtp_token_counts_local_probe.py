"""Probe of the token counts that weigh a multi-token prediction: releases without counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from probing import parsed_once

from megacpp_overlays.feature_probes.mtp_token_counts_local import LOSS, probe
from megacpp_overlays.model import Verdict

WITHOUT_COUNTS = ("0.12.0", "0.16.1")

Wheel = Callable[[str, str], Path]


@pytest.mark.parametrize("version", WITHOUT_COUNTS)
def test_releases_without_token_counts_are_absent(version: str, wheel: Wheel) -> None:
    finding = probe(parsed_once(wheel("megatron-core", version)))

    assert finding.verdict is Verdict.ABSENT
    assert finding.evidence[0].seen == f"defines no {LOSS}"
