"""The probe of pack 10 on stand-ins, real trees, and another module of that name."""

from __future__ import annotations

from pathlib import Path

import pytest
from probing import ask
from trees import STAND_INS

from megacpp_overlays.feature_probes import hopper_flce_dispatch as feature
from megacpp_overlays.model import Verdict
from megacpp_overlays.overlays.hopper_flce_dispatch import OVERLAY
from megacpp_overlays.source.file_trees import DirectoryTree

DEV, PR3345 = STAND_INS["dev-linear-cross-entropy"], STAND_INS["pr3345-linear-cross-entropy"]
TARGET = Path("megatron/core/fusions/fused_linear_cross_entropy.py")


@pytest.mark.parametrize(
    ("dispatcher", "shape"),
    [(DEV, feature.BLACKWELL_ONLY), (PR3345, feature.BLACKWELL_AND_HOPPER)],
    ids=["dev", "pr3345"],
)
def test_a_dispatcher_that_lacks_branches_is_broken(dispatcher: Path, shape: str) -> None:
    found = ask(feature.probe, DirectoryTree(dispatcher))

    assert (found.verdict, found.shape) == (Verdict.BROKEN, shape)
    assert shape in OVERLAY.replacements
    assert ask(OVERLAY.probe, DirectoryTree(dispatcher)).verdict is not Verdict.FIXED


def test_every_tree_is_recognised(tree: Path) -> None:
    found = ask(feature.probe, DirectoryTree(tree))

    assert found.verdict is not Verdict.UNRECOGNISED, found.summary()
    assert (found.verdict is Verdict.ABSENT) == (not (tree / TARGET).exists())


def test_another_module_of_that_name_has_no_dispatcher(tmp_path: Path) -> None:
    """As in pull request 4312."""
    (tmp_path / TARGET).parent.mkdir(parents=True)
    (tmp_path / TARGET).write_text("def fused_linear_cross_entropy(x, weight, labels): ...\n")

    found = ask(feature.probe, DirectoryTree(tmp_path))

    assert (found.verdict, found.summary()) == (
        Verdict.ABSENT,
        "defines no Platform (fused_linear_cross_entropy.py)",
    )
