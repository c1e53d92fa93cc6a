"""The probe of pack 09: its evidence for each release, and its advice."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from probing import Texts, ask, parsed_once
from releases import daily

from megacpp_overlays.feature_probes import liger_flce_none_backward as feature
from megacpp_overlays.model import Body, Finding, Proof, Verdict
from megacpp_overlays.overlays.liger_flce_none_backward import OVERLAY

Wheel = Callable[[str, str], Path]

DETACHED = (Verdict.BROKEN, feature.DETACHED)  # per-token losses; a forward pass without gradients works
ANY_INPUT = (Verdict.BROKEN, feature.INPUT_NEEDS_GRADIENT)  # 0.6.3 leaves grad_weight unbound without them
WITH_BIAS = (Verdict.BROKEN, feature.BIAS_NEEDS_GRADIENT)  # 0.6.4 detaches a bias gradient that may be None

DISTINCT = {
    "0.5.3": DETACHED,
    "0.6.3": ANY_INPUT,
    "0.6.4": WITH_BIAS,
    "0.6.5": WITH_BIAS,
    "0.8.0": DETACHED,
    "0.8.1": DETACHED,
}
"""The releases whose texts differ, of those that are repaired."""


@functools.cache
def text_of(wheel: Path, name: str) -> str:
    source = parsed_once(wheel).module(name)
    assert source is not None
    return source.text


def examine(wheel: Path, text: str) -> Finding:
    """Return the finding of the probe on a release with another text of the target module."""
    return ask(OVERLAY.probe, Texts({OVERLAY.target.module: text}, parsed_once(wheel)))


@pytest.mark.parametrize("version", DISTINCT)
def test_the_evidence_names_the_releases_that_the_text_is_from(wheel: Wheel, version: str) -> None:
    finding = OVERLAY.probe(parsed_once(wheel("liger-kernel", version)))

    assert (finding.verdict, finding.shape) == DISTINCT[version]
    assert f"as in {version}" in finding.summary()


@pytest.mark.parametrize("version", daily("0.8.2", "0.8.3", "0.8.4", "0.8.5"))
def test_a_repair_is_the_same_in_another_layout(wheel: Wheel, version: str) -> None:
    release = wheel("liger-kernel", version)

    finding = examine(release, ast.unparse(ast.parse(text_of(release, feature.MODULE))))

    assert (finding.verdict, finding.proof) == (Verdict.FIXED, Proof.READ)
    assert f"as in {version}" in finding.summary()
    assert Body(feature.MODULE, feature.FUNCTION) in finding.repair


@pytest.mark.parametrize("shape", OVERLAY.unsupported)
def test_a_shape_that_is_not_repaired_names_the_way_out(shape: str) -> None:
    assert "0.8.2 or newer" in OVERLAY.unsupported[shape]
