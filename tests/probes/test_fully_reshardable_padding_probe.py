"""The probe of a parameter's offsets in a fully reshardable checkpoint: releases without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from probing import Texts, ask, parsed_once

from megacpp_overlays.feature_probes.fully_reshardable_padding import SAVE, TARGET, probe
from megacpp_overlays.model import Finding, Verdict

NONE = ("0.6.0", "0.14.0")
OPTIMIZERS = "megatron.core.optimizer.optimizer"

Wheel = Callable[[str, str], Path]


def examine(text: str | None, **others: str) -> Finding:
    return ask(probe, Texts({TARGET.module: text, **others}))


@pytest.mark.parametrize("version", NONE)
def test_releases_without_the_format_are_absent(version: str, wheel: Wheel) -> None:
    finding = probe(parsed_once(wheel("megatron-core", version)))

    assert finding.verdict is Verdict.ABSENT
    assert finding.evidence[0].seen == "DistributedOptimizer has no fully reshardable format"


def test_a_format_that_another_class_may_give_is_not_absent(wheel: Wheel) -> None:
    source = parsed_once(wheel("megatron-core", "0.14.0")).module(TARGET.module)
    assert source is not None
    base = f"class MixedPrecisionOptimizer:\n    def {SAVE}(self): ...\n"

    assert examine(source.text).verdict is Verdict.ABSENT
    assert examine(source.text, **{OPTIMIZERS: base}).verdict is Verdict.UNRECOGNISED
    assert examine(f"{source.text}\n\nsetattr(Later, '{SAVE}', cut)\n").verdict is Verdict.UNRECOGNISED
