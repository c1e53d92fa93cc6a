"""Over which blocks of heads rotary kernels of MLA are tuned: every release, main, dev, and edits of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from probing import Texts, ask
from repair_cases import released

from megacpp_overlays.feature_probes.mla_rope_head_blocks import MODULE, OF_QUERIES, probe
from megacpp_overlays.model import Verdict
from megacpp_overlays.source.file_trees import ArchiveTree, DirectoryTree

Wheel = Callable[[str, str], Path]


@pytest.mark.parametrize("version", ["0.1.0", "0.9.0", "0.12.3"])
def test_releases_without_the_kernels_have_none(version: str, wheel: Wheel) -> None:
    assert ask(probe, ArchiveTree(wheel("megatron-core", version))).verdict is Verdict.ABSENT


@pytest.mark.parametrize(
    "version", ["0.13.0", "0.13.1", "0.14.0", "0.15.3", "0.16.0", "0.17.1", "0.18.2", "0.19.0", "0.19.2"]
)
def test_releases_are_broken(version: str, wheel: Wheel) -> None:
    finding = probe(ArchiveTree(wheel("megatron-core", version)))

    assert (finding.verdict, finding.shape) == (Verdict.BROKEN, OF_QUERIES)


def test_given_trees_are_recognised(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        assert ask(probe, DirectoryTree(path)).verdict is not Verdict.UNRECOGNISED, path


def test_a_text_of_the_same_meaning_is_known_and_an_edited_one_is_not() -> None:
    text = released("megatron_core-0.19.2", MODULE)

    assert ask(probe, Texts({MODULE: f"# as it was\n{text}"})).verdict is Verdict.BROKEN
    for old, new in (('{"BLOCK_H": 128}', '{"BLOCK_H": 256}'), ("tl.program_id(axis=1)", "tl.program_id(axis=1) + 0")):
        assert old in text
        assert ask(probe, Texts({MODULE: text.replace(old, new, 1)})).verdict is Verdict.UNRECOGNISED


def test_a_mask_that_knows_its_block_looks_repaired() -> None:
    old, new = "mask = x_off < head_num", "mask = x_off + pid_head * BLOCK_H * stride_x_nheads < head_num"
    text = released("megatron_core-0.19.2", MODULE)

    found = ask(probe, Texts({MODULE: text.replace(old, new)}))

    assert found.verdict is Verdict.UNRECOGNISED
    assert found.looks_repaired


def test_what_is_not_there_is_absent() -> None:
    assert ask(probe, Texts({MODULE: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({MODULE: "def fused_apply_mla_rope_for_q(t): return t"})).verdict is Verdict.UNRECOGNISED
