"""The probe for gradients of norms that are summed by name: releases of each form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from probing import Texts, ask, parsed_once

from megacpp_overlays.feature_probes.tp_norm_gradients import BY_NAME, OLD_BY_NAME, TARGET, probe
from megacpp_overlays.model import Verdict

SHAPES = {"0.12.3": OLD_BY_NAME, "0.15.3": BY_NAME, "0.16.0": BY_NAME, "0.19.2": BY_NAME}
WITH_NETS = ("0.16.0", "0.19.2")

Wheel = Callable[[str, str], Path]


@pytest.mark.parametrize("version", SHAPES)
def test_a_broken_release_names_the_norms_whose_gradients_are_summed(version: str, wheel: Wheel) -> None:
    finding = probe(parsed_once(wheel("megatron-core", version)))

    assert (finding.verdict, finding.shape) == (Verdict.BROKEN, SHAPES[version])
    assert ("output norms" in finding.summary()) == (version in WITH_NETS)


def test_a_missing_target_is_absent() -> None:
    assert ask(probe, Texts({TARGET.module: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: "def other(): pass"})).verdict is Verdict.ABSENT
