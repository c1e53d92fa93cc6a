"""The probe for dimensions that the TileLang backend declines: its evidence for a release, and edits of the newest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from dsa_source import statement_edits
from edited_code import archive
from probing import Texts, ask, parsed_once
from trees import STAND_INS

from megacpp_overlays.feature_probes.sparse_mla_dimensions import DISPATCHER, FUNCTION, ONE_KERNEL, TARGET, probe
from megacpp_overlays.model import Verdict
from megacpp_overlays.source.file_trees import DirectoryTree

WITH = ("0.19.0", "0.19.2")
Wheel = Callable[[str, str], Path]


@pytest.mark.parametrize("version", WITH)
def test_releases_with_one_kernel_are_broken(version: str, wheel: Wheel) -> None:
    finding = probe(parsed_once(wheel("megatron-core", version)))

    assert (finding.verdict, finding.shape) == (Verdict.BROKEN, ONE_KERNEL)
    assert "declines other channels than 576 and 512 (tilelang_dsa.py:763)" in finding.summary()


def test_given_trees_are_broken_absent_or_not_recognised(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        expected = {Verdict.BROKEN, Verdict.ABSENT, Verdict.UNRECOGNISED}
        assert ask(probe, DirectoryTree(path)).verdict in expected, path


def test_an_earlier_form_is_not_recognised() -> None:
    assert ask(probe, DirectoryTree(STAND_INS["sparse_mla_summer"])).verdict is Verdict.UNRECOGNISED


def test_a_backend_that_is_not_there_is_absent() -> None:
    assert ask(probe, Texts({TARGET.module: None})).verdict is Verdict.ABSENT


@pytest.mark.parametrize(
    "text",
    [
        f"from vendor import {FUNCTION}, {DISPATCHER}\n",
        "from vendor import *\n",
        f"def {DISPATCHER}(): ...\n",
        "def sparse_mla(): ...\n",
    ],
)
def test_what_comes_from_elsewhere_or_was_renamed_is_not_absent(text: str) -> None:
    assert ask(probe, Texts({TARGET.module: text})).verdict is Verdict.UNRECOGNISED


@pytest.mark.full
@pytest.mark.unmeasured
@pytest.mark.parametrize("symbol", [FUNCTION, DISPATCHER, "_is_supported_sparse_mla_head_count", "_all_bfloat16"])
def test_no_statement_of_what_was_read_may_change(symbol: str) -> None:
    tree, edits = archive("megatron_core-0.19.2"), 0
    source = tree.module(TARGET.module)
    assert source is not None
    for what, text in statement_edits(source.text, symbol):
        assert ask(probe, Texts({TARGET.module: text}, tree)).verdict is Verdict.UNRECOGNISED, what
        edits += 1
    assert edits
