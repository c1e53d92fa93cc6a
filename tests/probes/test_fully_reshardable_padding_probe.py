"""The probe of a parameter's offsets in a fully reshardable checkpoint: releases without one, given trees, and edits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from probing import Texts, ask, parsed_once

from megacpp_overlays.feature_probes.fully_reshardable_padding import LOAD, SAVE, TARGET, probe
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.source.file_trees import DirectoryTree

NONE = ("0.6.0", "0.14.0")
OPTIMIZERS = "megatron.core.optimizer.optimizer"

Wheel = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def newest(wheel: Wheel) -> str:
    source = parsed_once(wheel("megatron-core", "0.19.2")).module(TARGET.module)
    assert source is not None
    return source.text


def examine(text: str | None, **others: str) -> Finding:
    return ask(probe, Texts({TARGET.module: text, **others}))


@pytest.mark.parametrize("version", NONE)
def test_releases_without_the_format_are_absent(version: str, wheel: Wheel) -> None:
    finding = probe(parsed_once(wheel("megatron-core", version)))

    assert finding.verdict is Verdict.ABSENT
    assert finding.evidence[0].seen == "DistributedOptimizer has no fully reshardable format"


def test_given_trees_are_recognised(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        assert ask(probe, DirectoryTree(path)).verdict is not Verdict.UNRECOGNISED, path


def test_what_is_not_there_is_absent() -> None:
    assert examine(None).verdict is Verdict.ABSENT
    assert examine("class Other: pass").verdict is Verdict.ABSENT


@pytest.mark.parametrize("method", [SAVE, LOAD, "get_parameter_state_dp_zero"])
@pytest.mark.parametrize("how", ["a parameter more", "decorated", "under a flag", "twice", "set outside", "gone"])
def test_every_body_that_the_seams_go_around_must_be_one_that_was_read(newest: str, method: str, how: str) -> None:
    before, head, after = newest.partition(f"    def {method}(")
    assert head
    text = {
        "a parameter more": before + head + re.sub(r"\A\s*self,", "self, more,", after),
        "decorated": f"{before}    @other\n{head}{after}",
        "under a flag": f"{before}    if FLAG:\n    {head}self): ...\n\n{head}{after}",
        "twice": f"{before}{head}self): ...\n\n{head}{after}",
        "set outside": f"{newest}\n\nDistributedOptimizer.{method} = other\n",
        "gone": f"{before}    def of_old({after}",
    }[how]
    assert text != newest

    assert examine(text).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("class DistributedOptimizer(MixedPrecisionOptimizer)", "class DistributedOptimizer(Mixed)"),
        ("class DistributedOptimizer(", "@other\nclass DistributedOptimizer("),
        ("class DistributedOptimizer(", "from vendor import *\n\n\nclass DistributedOptimizer("),
        ("[param_world_start:param_world_end]", "[param_world_start + 1 : param_world_end]"),
        ("offset_in_world_tensors += gbuf_world_numel_unpadded", "offset_in_world_tensors += gbuf_world_numel"),
        ('if k == "step":\n', 'if k == "steps":\n'),
    ],
    ids=["base", "class decorated", "star", "cut elsewhere", "gathered with padding", "loaded otherwise"],
)
def test_an_edit_is_not_recognised(newest: str, old: str, new: str) -> None:
    assert old in newest

    assert examine(newest.replace(old, new)).verdict is Verdict.UNRECOGNISED


def test_a_format_that_another_class_may_give_is_not_absent(wheel: Wheel) -> None:
    source = parsed_once(wheel("megatron-core", "0.14.0")).module(TARGET.module)
    assert source is not None
    base = f"class MixedPrecisionOptimizer:\n    def {SAVE}(self): ...\n"

    assert examine(source.text).verdict is Verdict.ABSENT
    assert examine(source.text, **{OPTIMIZERS: base}).verdict is Verdict.UNRECOGNISED
    assert examine(f"{source.text}\n\nsetattr(Later, '{SAVE}', cut)\n").verdict is Verdict.UNRECOGNISED
