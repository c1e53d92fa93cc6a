"""The probe of the marks of attention sinks: given trees, and edits of the newest release."""

from __future__ import annotations

from pathlib import Path

import pytest
from edited_code import edited_release
from probing import Texts, ask

from megacpp_overlays.feature_probes.tp_attention_sinks import CORE, LATENT_TARGET, TARGET, probe, probe_latent
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.source.file_trees import DirectoryTree


def edited(module: str, old: str, new: str) -> Finding:
    return ask(probe, edited_release(module, old, new))


def test_given_trees_are_broken(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        for each in (probe, probe_latent):
            assert ask(each, DirectoryTree(path)).verdict is Verdict.BROKEN, path


def test_what_is_not_there_is_absent() -> None:
    kind = "class {}Attention:\n    def __init__(self): pass\n"
    attention = kind.format("Self") + kind.format("Cross")
    assert ask(probe, Texts({TARGET.module: None, CORE: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: "class Other: pass", CORE: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: attention, CORE: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: attention, CORE: "class Other: pass"})).verdict is Verdict.ABSENT


@pytest.mark.parametrize(
    "text",
    [
        "from vendor import SelfAttention\n",
        "from vendor import *\n",
        "class SelfAttention: pass\nclass CrossAttention: pass\n",
    ],
)
def test_what_comes_from_elsewhere_is_not_absent(text: str) -> None:
    assert ask(probe, Texts({TARGET.module: text, CORE: "softmax_offset = None"})).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (TARGET.module, "        self.core_attention = submodules", "        self.core_attention = other(submodules)"),
        (TARGET.module, "        self.core_attention = submodules", "        self.core = submodules"),
        (TARGET.module, "class SelfAttention(", "@other\nclass SelfAttention("),
        (TARGET.module, '            attention_type="cross"', '            attention_type=other("cross")'),
        (TARGET.module, "class Attention(MegatronModule", "@other\nclass Attention(MegatronModule"),
        (TARGET.module, "class Attention(MegatronModule", "class Attention(Other"),
        (CORE, "        self.tp_group = self.pg_collection.tp\n", "        self.tp_group = other(pg_collection)\n"),
        (CORE, '"softmax_offset"', '"sinks"'),
        (CORE, "class DotProductAttention(MegatronModule", "class DotProductAttention(Other"),
    ],
    ids=[
        "another core",
        "no core",
        "a decorated kind",
        "another kind",
        "a decorated class",
        "a base",
        "another group",
        "other sinks",
        "a base of cores",
    ],
)
def test_constructors_must_be_as_they_were_read(module: str, old: str, new: str) -> None:
    assert edited(module, old, new).verdict is Verdict.UNRECOGNISED


def edited_latent(old: str, new: str) -> Finding:
    return ask(probe_latent, edited_release(LATENT_TARGET.module, old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        self.core_attention = build_module(", "        self.core_attention = other("),
        ("        self.core_attention = build_module(", "        self.core = build_module("),
        ("        self.softmax_scale = mscale", "        self.softmax_scale = other(mscale)"),
        ("class MultiLatentAttention(Attention)", "class MultiLatentAttention(Other)"),
        ("class MultiLatentAttention(Attention)", "@other\nclass MultiLatentAttention(Attention)"),
    ],
    ids=["another core", "no core", "another scale", "a base", "a decorated class"],
)
def test_the_constructor_of_latent_attention_must_be_as_it_was_read(old: str, new: str) -> None:
    assert edited_latent(old, new).verdict is Verdict.UNRECOGNISED


def test_without_latent_attention_or_sinks_there_is_nothing_to_mark() -> None:
    latent = "class MultiLatentAttention:\n    def __init__(self): pass\n"
    for texts in (
        {LATENT_TARGET.module: None, CORE: "softmax_offset = None"},
        {LATENT_TARGET.module: "class Other: pass", CORE: "softmax_offset = None"},
        {LATENT_TARGET.module: latent, CORE: None},
        {LATENT_TARGET.module: latent, CORE: "class Other: pass"},
    ):
        assert ask(probe_latent, Texts(texts)).verdict is Verdict.ABSENT


@pytest.mark.parametrize(
    "text",
    ["from vendor import MultiLatentAttention\n", "from vendor import *\n", "class MultiLatentAttention: pass\n"],
)
def test_a_latent_attention_from_elsewhere_is_not_absent(text: str) -> None:
    texts = {LATENT_TARGET.module: text, CORE: "softmax_offset = None"}

    assert ask(probe_latent, Texts(texts)).verdict is Verdict.UNRECOGNISED
