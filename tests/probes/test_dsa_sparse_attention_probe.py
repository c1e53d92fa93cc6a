"""The probe for scores of all keys in absorbed attention: its evidence for a release, and edits of the newest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from dsa_source import statement_edits
from edited_code import archive
from probing import Texts, ask, parsed_once
from trees import STAND_INS

from megacpp_overlays.feature_probes.dsa_sparse_attention import ALL_KEYS, FUNCTION, MASKING, TARGET, probe
from megacpp_overlays.model import Verdict
from megacpp_overlays.source.file_trees import DirectoryTree

Wheel = Callable[[str, str], Path]


def newest(module: str) -> str:
    source = archive("megatron_core-0.19.2").module(module)
    assert source is not None
    return source.text


@pytest.mark.parametrize("version", ["0.19.0", "0.19.2"])
def test_releases_that_build_all_scores_are_broken(version: str, wheel: Wheel) -> None:
    finding = probe(parsed_once(wheel("megatron-core", version)))

    assert (finding.verdict, finding.shape) == (Verdict.BROKEN, ALL_KEYS)
    assert "builds [batch, heads, queries, keys] in float32 (dsa.py:59)" in finding.summary()


def test_given_trees_are_broken_absent_or_not_recognised(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        expected = {Verdict.BROKEN, Verdict.ABSENT, Verdict.UNRECOGNISED}
        assert ask(probe, DirectoryTree(path)).verdict in expected, path


@pytest.mark.parametrize("name", ["dsa-june", "dsa-spring"])
def test_earlier_forms_are_not_recognised(name: str) -> None:
    assert ask(probe, DirectoryTree(STAND_INS[name])).verdict is Verdict.UNRECOGNISED


def test_what_is_not_there_is_absent() -> None:
    assert ask(probe, Texts({TARGET.module: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: "def unfused_dsa_fn(): pass"})).verdict is Verdict.ABSENT


@pytest.mark.parametrize(
    "text",
    [
        f"from vendor import {FUNCTION}\n",
        "from vendor import *\n",
        f"{FUNCTION} = vendor.dense\n",
        f"def attention(): return vendor.{FUNCTION}()\n",
    ],
)
def test_what_comes_from_elsewhere_is_not_absent(text: str) -> None:
    assert ask(probe, Texts({TARGET.module: text})).verdict is Verdict.UNRECOGNISED


def test_without_its_masks_nothing_is_recognised() -> None:
    assert ask(probe, Texts({MASKING: None}, archive("megatron_core-0.19.2"))).verdict is Verdict.UNRECOGNISED


@pytest.mark.full
@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("module", "symbol"),
    [
        (TARGET.module, FUNCTION),
        (MASKING, "build_valid_mask_from_starts_ends"),
        (MASKING, "normalize_varlen_bounds"),
        (MASKING, "masked_softmax"),
    ],
)
def test_no_statement_of_what_was_read_may_change(module: str, symbol: str) -> None:
    tree, edits = archive("megatron_core-0.19.2"), 0
    for what, text in statement_edits(newest(module), symbol):
        assert ask(probe, Texts({module: text}, tree)).verdict is Verdict.UNRECOGNISED, what
        edits += 1
    assert edits >= 10
