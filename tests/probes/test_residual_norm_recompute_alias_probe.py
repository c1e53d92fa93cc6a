"""The probe for outputs that are freed although they are the input: given trees, and edits of the newest release."""

from __future__ import annotations

from pathlib import Path

import pytest
from edited_code import edited_release
from probing import Texts, ask

from megacpp_overlays.feature_probes.residual_norm_recompute_alias import ENGINE, TARGET, probe
from megacpp_overlays.model import Verdict
from megacpp_overlays.source.file_trees import DirectoryTree

HAS_THE_NORM = {ENGINE: "class TEFusedResidualRMSNorm: pass"}


def test_given_trees_are_recognised(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        assert ask(probe, DirectoryTree(path)).verdict is not Verdict.UNRECOGNISED, path


def test_what_is_not_there_is_absent() -> None:
    assert ask(probe, Texts({TARGET.module: None, **HAS_THE_NORM})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: "class Other: pass", **HAS_THE_NORM})).verdict is Verdict.ABSENT


def test_an_imported_or_inherited_class_is_not_absent() -> None:
    from_elsewhere = "from vendor import CheckpointWithoutOutput\n"
    inherited = "class CheckpointWithoutOutput(Other): pass\n"

    assert ask(probe, Texts({TARGET.module: from_elsewhere, **HAS_THE_NORM})).verdict is Verdict.UNRECOGNISED
    assert ask(probe, Texts({TARGET.module: inherited, **HAS_THE_NORM})).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        self.outputs = outputs\n", "        self.outputs = [outputs]\n"),
        ("zip(self.outputs, outputs):\n", "zip(reversed(self.outputs), outputs):\n"),
        ("            output.untyped_storage().resize_(0)\n", "            self.released.append(output)\n"),
        (
            "            outputs = run_function(*args)\n        ctx.",
            "            outputs = run_function(args)\n        ctx.",
        ),
        ("def _get_share_storage():\n", "@other\ndef _get_share_storage():\n"),
        ("class CheckpointWithoutOutput(object):", "class CheckpointWithoutOutput(Other):"),
    ],
    ids=["a list in it", "another order", "freed later", "other arguments", "another way to restore", "a base"],
)
def test_an_edit_of_the_code_that_frees_and_restores_is_not_recognised(old: str, new: str) -> None:
    assert ask(probe, edited_release(TARGET.module, old, new, release="0.19.2")).verdict is Verdict.UNRECOGNISED
