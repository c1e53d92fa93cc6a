"""The probe for a step of Megatron-FSDP with an optimizer that it prepares: releases without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from probing import parsed_once

from megacpp_overlays.feature_probes.fsdp_optimizer_under_update import probe
from megacpp_overlays.model import Verdict

WITHOUT_FSDP = ("0.1.0", "0.13.1")
WITHOUT_STEP = ("0.14.0", "0.16.1")

Wheel = Callable[[str, str], Path]


@pytest.mark.parametrize("version", [*WITHOUT_FSDP, *WITHOUT_STEP])
def test_releases_that_take_no_step_are_absent(version: str, wheel: Wheel) -> None:
    finding = probe(parsed_once(wheel("megatron-core", version)))

    assert finding.verdict is Verdict.ABSENT
    assert ("no step is taken" in finding.summary()) is (version in WITHOUT_STEP)
