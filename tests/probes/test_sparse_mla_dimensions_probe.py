"""The probe for dimensions that the TileLang backend declines: its evidence for a release."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from probing import ask, parsed_once
from trees import STAND_INS

from megacpp_overlays.feature_probes.sparse_mla_dimensions import ONE_KERNEL, probe
from megacpp_overlays.model import Verdict
from megacpp_overlays.source.file_trees import DirectoryTree

WITH = ("0.19.0", "0.19.2")
Wheel = Callable[[str, str], Path]


@pytest.mark.parametrize("version", WITH)
def test_releases_with_one_kernel_are_broken(version: str, wheel: Wheel) -> None:
    finding = probe(parsed_once(wheel("megatron-core", version)))

    assert (finding.verdict, finding.shape) == (Verdict.BROKEN, ONE_KERNEL)
    assert "declines other channels than 576 and 512 (tilelang_dsa.py:763)" in finding.summary()


def test_an_earlier_form_is_not_recognised() -> None:
    assert ask(probe, DirectoryTree(STAND_INS["sparse_mla_summer"])).verdict is Verdict.UNRECOGNISED
