"""The probe for index scores over four axes: recorded forms and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from probing import parsed_once
from trees import STAND_INS

from megacpp_overlays.feature_probes import dsa_indexer_streaming as feature
from megacpp_overlays.loader.probing import examine
from megacpp_overlays.model import Verdict
from megacpp_overlays.overlays.dsa_indexer_streaming import BACKWARD, LOSS, OTHER_TOP_K, OVERLAY
from megacpp_overlays.source import forms
from megacpp_overlays.source.file_trees import DirectoryTree

DSA = feature.TARGET.module
RECORD = forms.record(OVERLAY.id, DSA)
Wheel = Callable[[str, str], Path]


@pytest.mark.parametrize(
    ("version", "shape", "builds"),
    [
        ("0.16.1", feature.FOUR_AXIS_METHOD, {feature.SCORES}),
        ("0.17.0", feature.SOFTENED_LOSS, {feature.SCORES, BACKWARD, LOSS}),
        ("0.18.2", feature.SOFTENED_LOSS, {feature.SCORES, BACKWARD, LOSS}),
        ("0.19.2", feature.EXACT_LOSS, {feature.SCORES, BACKWARD, LOSS}),
    ],
)
def test_a_release_is_broken_and_the_evidence_names_the_code_that_builds(
    version: str, shape: str, builds: set[str], wheel: Wheel
) -> None:
    finding = examine(OVERLAY, parsed_once(wheel("megatron-core", version)))

    assert finding.shape == shape
    seen = [each for each in finding.evidence if " builds [" in each.seen]
    assert {each.seen.partition(" builds [")[0] for each in seen} == builds
    assert all(each.file is not None and each.file.endswith("/dsa.py") and each.line for each in seen)


@pytest.mark.parametrize("version", ["0.16.1", "0.18.2", "0.19.0", "0.19.2"])
def test_the_decision_names_the_backends_that_go_past_it_since_they_are_there(version: str, wheel: Wheel) -> None:
    seen = examine(OVERLAY, parsed_once(wheel("megatron-core", version))).summary()

    assert ("where dsa_kernel_backend is not none" in seen) is version.startswith("0.19")
    assert ("dsa_kernels.py:21" in seen) is version.startswith("0.19")


def test_every_tree_is_recognised(tree: Path) -> None:
    finding = examine(OVERLAY, DirectoryTree(tree))

    assert finding.verdict in {Verdict.BROKEN, Verdict.ABSENT}, finding.summary()


@pytest.mark.parametrize("stand_in", STAND_INS.values(), ids=STAND_INS)
def test_a_tree_without_an_indexer_has_nothing_to_repair(stand_in: Path) -> None:
    assert examine(OVERLAY, DirectoryTree(stand_in)).verdict is Verdict.ABSENT


def test_every_recorded_shape_has_seams_and_so_have_those_that_leave_the_choice_of_keys() -> None:
    shapes = {form.shape for form in RECORD.forms if form.verdict is Verdict.BROKEN}

    assert shapes | set(OTHER_TOP_K.values()) == set(OVERLAY.replacements)
    assert not shapes & set(OTHER_TOP_K.values())
