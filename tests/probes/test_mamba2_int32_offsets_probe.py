"""The probe of the width of offsets in Mamba-2's kernels: their places in a release."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from edited_code import archive
from probing import ask

from megacpp_overlays.feature_probes.mamba2_int32_offsets import NARROW, NORM, SCAN, probe_norm, probe_scan
from megacpp_overlays.model import Finding, Target, Verdict
from megacpp_overlays.source.trees import SourceTree

Probe = Callable[[SourceTree], Finding]

BOTH = [(probe_scan, SCAN), (probe_norm, NORM)]


@pytest.mark.parametrize("version", ["2.0.1", "2.3.2.post1"])
@pytest.mark.parametrize(("probe", "target"), BOTH)
def test_releases_of_mamba_2_are_broken(version: str, probe: Probe, target: Target) -> None:
    finding = probe(archive(f"mamba_ssm-{version}.tar"))

    assert (finding.verdict, finding.shape) == (Verdict.BROKEN, NARROW)
    assert finding.evidence[0].line is not None
    assert target.module.rpartition(".")[2] in str(finding.evidence[0].file)


def test_a_release_that_imports_missing_code_is_not_recognised() -> None:
    assert ask(probe_scan, archive("mamba_ssm-2.0.0.tar")).verdict is Verdict.UNRECOGNISED
