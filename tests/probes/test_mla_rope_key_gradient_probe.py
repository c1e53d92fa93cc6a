"""Whose heads the shared rotary keys of MLA learn from: given trees, and edits of the newest release."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from probing import Texts, ask, parsed_once

from megacpp_overlays.feature_probes.mla_rope_key_gradient import (
    METHOD,
    TARGET,
    probe,
)
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.source.file_trees import DirectoryTree

MAPPINGS, FINALIZE = "megatron.core.tensor_parallel.mappings", "megatron.core.distributed.finalize_model_grads"
MODULES = (TARGET.module, MAPPINGS, FINALIZE)

Wheel = Callable[[str, str], Path]


def texts_of(wheel: Wheel, version: str) -> dict[str, str | None]:
    tree = parsed_once(wheel("megatron-core", version))
    return {name: found.text for name in MODULES if (found := tree.module(name)) is not None}


def edited(texts: dict[str, str | None], old: str, new: str, module: str = TARGET.module) -> Finding:
    text = texts[module]
    assert text is not None
    assert old in text
    return ask(probe, Texts({**texts, module: text.replace(old, new)}))


@pytest.fixture(scope="module")
def newest(wheel: Wheel) -> dict[str, str | None]:
    return texts_of(wheel, "0.19.2")


@pytest.fixture(scope="module")
def older(wheel: Wheel) -> dict[str, str | None]:
    return texts_of(wheel, "0.16.1")


def test_given_trees_are_recognised(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        assert ask(probe, DirectoryTree(path)).verdict is not Verdict.UNRECOGNISED, path


def test_what_is_not_there_is_absent() -> None:
    assert ask(probe, Texts({TARGET.module: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: "class Other: pass"})).verdict is Verdict.ABSENT


def test_an_attention_that_takes_its_keys_from_elsewhere_is_not_absent() -> None:
    text = "class MLASelfAttention(MultiLatentAttention):\n    def forward(self): ...\n"

    assert ask(probe, Texts({TARGET.module: text})).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize("name", ["get_query_key_value_tensors", "_qkv_down_projection", "__init__", "forward"])
@pytest.mark.parametrize("how", ["a parameter more", "decorated", "under a flag"])
def test_every_method_on_the_way_must_be_one_that_was_read(
    newest: dict[str, str | None], older: dict[str, str | None], name: str, how: str
) -> None:
    for texts in (newest, older):
        head = f"    def {name}(\n        self," if name != "_qkv_down_projection" else f"    def {name}(self,"
        if texts is older and name == "_qkv_down_projection":
            continue
        new = {
            "a parameter more": f"{head} more,",
            "decorated": f"    @other\n{head}",
            "under a flag": f"    if FLAG:\n        def {name}(self): ...\n\n{head}",
        }[how]
        assert edited(texts, head, new).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("class MLASelfAttention(MultiLatentAttention):", "class MLASelfAttention(Summed, MultiLatentAttention):"),
        ("class FusedMLASelfAttention(MLASelfAttention):", "class FusedMLASelfAttention(MultiLatentAttention):"),
        ("class MultiLatentAttention(Attention):", "class MultiLatentAttention(SummedAttention):"),
        ("class FusedMLASelfAttention(MLASelfAttention):", "class Fused(MLASelfAttention):"),
        (
            "    def backward_dw(self)",
            "    def get_query_key_value_tensors(self): ...\n\n    def backward_dw(self)",
        ),
        ("    gather_from_sequence_parallel_region,\n", "    gather as gather_from_sequence_parallel_region,\n"),
        ("@dataclass\n", "scatter_to_sequence_parallel_region = other\n\n\n@dataclass\n"),
    ],
    ids=["base", "fused base", "base of all", "no fused", "twice", "another gather", "another scatter"],
)
def test_classes_of_another_kind_are_not_recognised(newest: dict[str, str | None], old: str, new: str) -> None:
    assert edited(newest, old, new).verdict is Verdict.UNRECOGNISED


def test_an_older_attention_with_a_down_projection_of_its_own_is_not_recognised(older: dict[str, str | None]) -> None:
    head = "    def get_query_key_value_tensors("

    found = edited(older, head, f"    def _qkv_down_projection(self, hidden_states): ...\n\n{head}")

    assert found.verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize("module", [MAPPINGS, FINALIZE])
def test_without_what_gathers_and_sums_nothing_is_recognised(newest: dict[str, str | None], module: str) -> None:
    assert ask(probe, Texts({**newest, module: None})).verdict is Verdict.UNRECOGNISED


def test_the_target_is_the_method() -> None:
    assert TARGET.symbol == METHOD
