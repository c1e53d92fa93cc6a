"""The probe of the tokens that a further prediction is weighed with: releases that count none."""

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
def test_releases_that_weigh_with_no_counts_are_absent(version: str, wheel: Wheel) -> None:
    finding = probe(parsed_once(wheel("megatron-core", version)))

    assert finding.verdict is Verdict.ABSENT
    assert finding.evidence[0].seen == f"defines no {LOSS}"
