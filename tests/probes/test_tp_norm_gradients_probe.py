"""The probe for gradients of norms that are summed by name: releases of each form, and edits of the newest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from edited_code import archive, edited_release
from probing import Texts, ask, parsed_once

from megacpp_overlays.feature_probes.tp_norm_gradients import (
    ATTENTION,
    BY_NAME,
    FUNCTION,
    OLD_BY_NAME,
    OLD_FUNCTION,
    TARGET,
    probe,
)
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.overlays.tp_norm_gradients import NET
from megacpp_overlays.source.file_trees import DirectoryTree

SHAPES = {"0.12.3": OLD_BY_NAME, "0.15.3": BY_NAME, "0.16.0": BY_NAME, "0.19.2": BY_NAME}
WITH_NETS = ("0.16.0", "0.19.2")
COMMON = f"{NET}.common"

Wheel = Callable[[str, str], Path]


def edited(module: str, old: str, new: str, *, release: str = "0.19.2") -> Finding:
    return ask(probe, edited_release(module, old, new, release=release))


@pytest.mark.parametrize("version", SHAPES)
def test_a_broken_release_names_the_norms_whose_gradients_are_summed(version: str, wheel: Wheel) -> None:
    finding = probe(parsed_once(wheel("megatron-core", version)))

    assert (finding.verdict, finding.shape) == (Verdict.BROKEN, SHAPES[version])
    assert ("output norms" in finding.summary()) == (version in WITH_NETS)


def test_given_trees_are_recognised(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        assert ask(probe, DirectoryTree(path)).verdict is not Verdict.UNRECOGNISED, path


def test_what_is_not_there_is_absent() -> None:
    assert ask(probe, Texts({TARGET.module: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: "def other(): pass"})).verdict is Verdict.ABSENT


@pytest.mark.parametrize(
    "text",
    [
        "def other(): pass\n",
        f"from vendor import {FUNCTION}\n",
        "from vendor import *\n",
        f"{FUNCTION} = vendor.summed\n",
    ],
)
def test_a_finalizer_that_sums_elsewhere_is_not_recognised(text: str) -> None:
    assert ask(probe, Texts({TARGET.module: text}, archive("megatron_core-0.19.2"))).verdict is Verdict.UNRECOGNISED


def test_a_delta_net_without_latent_attention_is_not_recognised() -> None:
    assert ask(probe, Texts({ATTENTION: None}, archive("megatron_core-0.19.2"))).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (TARGET.module, f"def {FUNCTION}(", f"@other\ndef {FUNCTION}("),
        (TARGET.module, f"    {FUNCTION}(model, config, tp_group)\n", "    other(model, config, tp_group)\n"),
        (TARGET.module, f"    {FUNCTION}(model, config, tp_group)\n", f"    {FUNCTION}(model, config, tp_group)\n" * 2),
        (TARGET.module, "ReduceOp.SUM, torch", "ReduceOp.AVG, torch"),
        (TARGET.module, f"\n{OLD_FUNCTION} = ", f"\n{FUNCTION} = other\n{OLD_FUNCTION} = "),
        (ATTENTION, "            self.q_layernorm = ", "            self.marked_layernorm = self.q_layernorm = "),
        (ATTENTION, "q_compressed = apply_module(self.q_layernorm)", "q_compressed = apply_module(self.q_layernorms)"),
        (ATTENTION, "class MLASelfAttention(", "@other\nclass MLASelfAttention("),
        (ATTENTION, "    def backward_dw(self)", "    def get_query_key_value_tensors(self): ...\n\n    def backward_dw(self)"),
        (COMMON, "        self.out_norm = ", "        self.marked_norm = self.out_norm = "),
        (COMMON, "        y = self.out_norm(x)", "        y = self.out_norm(summed(x))"),
        (COMMON, "class _GDNBase(MegatronModule)", "class _GDNBase(Marked, MegatronModule)"),
        (COMMON, "    def reset_parameters(self):\n", "    def reset_parameters(self):\n        mark(self.out_norm)\n"),
        (f"{NET}.gdn", "    def forward(\n", "    def mark(self):\n        mark(self.out_norm)\n\n    def forward(\n"),
    ],
    ids=[
        "decorated",
        "not called",
        "called twice",
        "averaged",
        "another one",
        "marked queries",
        "other norms",
        "a decorated attention",
        "other queries",
        "marked outputs",
        "summed outputs",
        "another base",
        "marked afterwards",
        "marked by a net",
    ],
)  # fmt: skip
def test_all_that_the_seam_relies_on_must_be_as_it_was_read(module: str, old: str, new: str) -> None:
    assert edited(module, old, new).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize("release", ["0.16.1", "0.18.2"])
def test_an_older_net_must_be_as_it_was_read_too(release: str) -> None:
    for old, new in (
        ("        self.out_norm = ", "        self.marked_norm = self.out_norm = "),
        ("        y = self.out_norm(x)", "        y = self.out_norm(summed(x))"),
    ):
        assert edited(NET, old, new, release=release).verdict is Verdict.UNRECOGNISED


def test_an_older_finalizer_must_be_as_it_was_read_too() -> None:
    assert edited(TARGET.module, "or 'k_layernorm' in name", "", release="0.12.3").verdict is Verdict.UNRECOGNISED
