"""The probe of the initialization of latent MoE experts: given trees, and edits of the newest release."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from edited_code import archive
from probing import Texts, ask

from megacpp_overlays.feature_probes.latent_moe_fc2_init import (
    GROUPED,
    SCALED_BY_SPECIFICATION,
    SINGLE,
    probe_grouped,
    probe_single,
)
from megacpp_overlays.model import Finding, Target, Verdict
from megacpp_overlays.overlays.latent_moe_fc2_init import PARTS
from megacpp_overlays.source.file_trees import DirectoryTree
from megacpp_overlays.source.trees import SourceTree

BOTH = pytest.mark.parametrize(
    ("target", "probe"), [(SINGLE, probe_single), (GROUPED, probe_grouped)], ids=["single", "grouped"]
)

Probe = Callable[[SourceTree], Finding]


def test_what_no_argument_reaches_is_not_repaired_and_says_what_to_do() -> None:
    for part in PARTS:
        assert "0.17.0 or newer" in part.unsupported[SCALED_BY_SPECIFICATION]


@BOTH
def test_given_trees_are_recognised(target: Target, probe: Probe, upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        assert ask(probe, DirectoryTree(path)).verdict is Verdict.BROKEN, path


@BOTH
def test_what_is_not_there_is_absent(target: Target, probe: Probe) -> None:
    assert ask(probe, Texts({target.module: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({target.module: "class Other: pass"})).verdict is Verdict.ABSENT


@BOTH
def test_what_comes_from_elsewhere_is_not_absent(target: Target, probe: Probe) -> None:
    name = target.symbol.partition(".")[0]
    for text in (f"from vendor import {name}\n", "from vendor import *\n"):
        assert ask(probe, Texts({target.module: text})).verdict is Verdict.UNRECOGNISED


@BOTH
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "        self.linear_fc2 = submodules.linear_fc2(\n",
            "        self.linear_fc2 = built(submodules.linear_fc2,\n",
        ),
        (
            "        self.linear_fc2 = submodules.linear_fc2(\n",
            "        submodules = other(submodules)\n        self.linear_fc2 = submodules.linear_fc2(\n",
        ),
        ("init_method=not_none(self.config.output_layer_init_method)", "init_method=not_none(method)"),
        ("        super().__init__(config=config)\n", "        super().__init__(config=other(config))\n"),
        ("apply_module, not_none", "apply_module, other as not_none"),
        (
            "config: TransformerConfig,\n        submodules: ",
            "more: int,\n        config: TransformerConfig,\n        submodules: ",
        ),
    ],
    ids=[
        "built by another",
        "another builder",
        "another method",
        "another config",
        "another helper",
        "a parameter more",
    ],
)
def test_the_constructor_must_be_as_it_was_read(target: Target, probe: Probe, old: str, new: str) -> None:
    source = archive("megatron_core-0.19.2").module(target.module)
    assert source is not None
    head, start, rest = source.text.partition(f"class {target.symbol.partition('.')[0]}(")
    parts = [head, start, rest.replace(old, new, 1)] if old in rest else [head.replace(old, new, 1), start, rest]
    text = "".join(parts)
    assert text != source.text

    assert ask(probe, Texts({target.module: text})).verdict is Verdict.UNRECOGNISED
