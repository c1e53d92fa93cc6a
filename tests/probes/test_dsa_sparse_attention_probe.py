"""The probe for scores of all keys in absorbed attention: its evidence for a release, and earlier forms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from probing import ask, parsed_once
from trees import STAND_INS

from megacpp_overlays.feature_probes.dsa_sparse_attention import ALL_KEYS, probe
from megacpp_overlays.model import Verdict
from megacpp_overlays.source.file_trees import DirectoryTree

Wheel = Callable[[str, str], Path]


@pytest.mark.parametrize("version", ["0.19.0", "0.19.2"])
def test_releases_that_build_all_scores_are_broken(version: str, wheel: Wheel) -> None:
    finding = probe(parsed_once(wheel("megatron-core", version)))

    assert (finding.verdict, finding.shape) == (Verdict.BROKEN, ALL_KEYS)
    assert "builds [batch, heads, queries, keys] in float32 (dsa.py:59)" in finding.summary()


@pytest.mark.parametrize("name", ["dsa-june", "dsa-spring"])
def test_earlier_forms_are_not_recognised(name: str) -> None:
    assert ask(probe, DirectoryTree(STAND_INS[name])).verdict is Verdict.UNRECOGNISED
