"""The probe of A_log and D in Megatron's Mamba mixers: given trees, and mixers of no release."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from probing import ParsedOnce, Texts, parsed_once

from megacpp_overlays.feature_probes.float16_mixer_parameters import GATED_DELTA_PRODUCT, MAMBA
from megacpp_overlays.loader import probing
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.overlays.float16_mixer_parameters import PARTS
from megacpp_overlays.source.file_trees import DirectoryTree
from megacpp_overlays.source.trees import SourceTree

Wheel = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def newest(wheel: Wheel) -> ParsedOnce:
    """The newest release."""
    return parsed_once(wheel("megatron-core", "0.19.2"))


def examine(tree: SourceTree, text: str | None, module: str = MAMBA.module) -> Finding:
    return probing.examine(PARTS[0], Texts({module: text}, tree))


def edited(text: str, old: str, new: str, count: int = 1) -> str:
    assert old in text
    return text.replace(old, new, count)


def test_given_trees_that_honour_marks_are_recognised(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        tree = DirectoryTree(path)
        source = tree.module("megatron.core.transformer.module")
        if source is None or "keep_in_fp32" not in source.text:
            continue
        for part in PARTS:
            assert probing.examine(part, tree).verdict in {Verdict.BROKEN, Verdict.FIXED, Verdict.ABSENT}, path


@pytest.mark.parametrize("text", [None, "class Float16Module: pass"])
def test_where_nothing_is_known_to_honour_marks_none_are_set(newest: ParsedOnce, text: str | None) -> None:
    finding = examine(newest, text, "megatron.core.transformer.module")

    assert finding.verdict is Verdict.UNRECOGNISED
    assert "honour the marks" in finding.summary()


# The gated delta product, which no release has: a made-up mixer with the relevant lines of main's.

PRODUCT = """
class GatedDeltaProductMixer(MegatronModule):
    def __init__(self, config):
        with tracker():
            A = torch.empty(
                self.nheads_local_tp, dtype=torch.float32, device=torch.cuda.current_device()
            ).uniform_(*A_init_range)
            A_log = torch.log(A)
            self.A_log = nn.Parameter(A_log)
            self.A_log._no_weight_decay = True
        self.D = None
        self.cp = GDPContextParallel(A_log_cp1=self.A_log, D_cp1=self.D)
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.D = None", "self.D = nn.Parameter(torch.ones(4))"),
        ("self.D = None", "self.D = None\n        self.A_log.keep_in_fp32 = self.D"),
        ("GDPContextParallel(", "Other("),
        ("", ""),
    ],
)
def test_a_gated_delta_product_needs_the_slices_that_are_known(newest: ParsedOnce, old: str, new: str) -> None:
    texts = {GATED_DELTA_PRODUCT.module: edited(PRODUCT, old, new)}

    assert probing.examine(PARTS[1], Texts(texts, newest)).verdict is Verdict.UNRECOGNISED


def test_both_parts_are_one_overlay_that_is_off_by_default() -> None:
    assert [part.target for part in PARTS] == [MAMBA, GATED_DELTA_PRODUCT]
    assert {part.id for part in PARTS} == {"float16-mixer-parameters"}
    assert all(part.opt_in for part in PARTS)
