"""The probe of the number of tokens by which a rank's loss is divided: releases that divide otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from probing import Texts, ask, parsed_once

from megacpp_overlays.feature_probes.cp_local_loss_mean import FUNCTION, TARGET, probe
from megacpp_overlays.model import Verdict

CALLER = "forward_step"
NO_COUNT = ("0.5.0", "0.6.0")
OF_ALL_RANKS = ("0.7.0", "0.12.3")

Wheel = Callable[[str, str], Path]


@pytest.mark.parametrize("version", [*NO_COUNT, *OF_ALL_RANKS])
def test_launchers_of_old_releases_divide_or_count_the_tokens_of_all_ranks(version: str, wheel: Wheel) -> None:
    finding = probe(parsed_once(wheel("megatron-core", version)))

    assert finding.verdict is Verdict.ABSENT
    assert ("of all ranks" if version in OF_ALL_RANKS else "no number of tokens") in finding.summary()


def test_a_name_that_is_imported_from_elsewhere_is_not_absent() -> None:
    for name in (FUNCTION, CALLER):
        text = f"from vendor import {name}\n"
        assert ask(probe, Texts({TARGET.module: text})).verdict is Verdict.UNRECOGNISED
