"""The probe of the boundaries between which a packed row is rolled: given trees, and edits of the newest release."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from probing import Texts, ask, parsed_once

from megacpp_overlays.feature_probes.mtp_roll_padded_boundaries import (
    PACKED,
    ROLL,
    TARGET,
    probe,
)
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.source.file_trees import DirectoryTree

WITHOUT_PACKED_ROWS = ("0.12.0", "0.15.3")

Wheel = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def newest(wheel: Wheel) -> Texts:
    tree = parsed_once(wheel("megatron-core", "0.19.2"))
    found = {name: tree.module(name) for name in (TARGET.module, "megatron.core.packed_seq_params")}
    return Texts({name: each.text for name, each in found.items() if each is not None})


def edited(newest: Texts, old: str, new: str, module: str = TARGET.module) -> Finding:
    texts = {
        name: source.text
        for name in (TARGET.module, "megatron.core.packed_seq_params")
        if (source := newest.module(name)) is not None
    }
    assert old in texts[module]
    return ask(probe, Texts({**texts, module: texts[module].replace(old, new)}))


@pytest.mark.parametrize("version", WITHOUT_PACKED_ROWS)
def test_releases_that_roll_no_packed_rows_are_absent(version: str, wheel: Wheel) -> None:
    finding = probe(parsed_once(wheel("megatron-core", version)))

    assert finding.verdict is Verdict.ABSENT
    assert finding.evidence[0].seen == "roll_tensor takes no packed rows"


def test_given_trees_are_recognised(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        assert ask(probe, DirectoryTree(path)).verdict is not Verdict.UNRECOGNISED, path


def test_what_is_not_there_is_absent() -> None:
    assert ask(probe, Texts({TARGET.module: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: "class Other: pass"})).verdict is Verdict.ABSENT


def test_packed_rows_that_go_another_way_are_not_absent() -> None:
    one = "def roll_tensor(tensor, packed_seq_params=None):\n    return by_document(tensor, packed_seq_params)\n"
    other = (
        "def roll_tensor(tensor):\n    return tensor\n\n\ndef later(params):\n    return params.cu_seqlens_q_padded\n"
    )

    for text in (one, other):
        assert ask(probe, Texts({TARGET.module: text})).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize("name", [ROLL, PACKED])
@pytest.mark.parametrize("how", ["a parameter more", "decorated", "under a flag", "twice", "set below", "its code set"])
def test_both_functions_must_be_ones_that_were_read(newest: Texts, name: str, how: str) -> None:
    head = f"def {name}("
    new = {
        "a parameter more": f"{head}more, ",
        "decorated": f"@other\n{head}",
        "under a flag": f"if FLAG:\n    def {name}(): ...\n\n\n{head}",
        "twice": f"def {name}(): ...\n\n\n{head}",
        "set below": f"{name} = other\n\n\n{head}",
        "its code set": f"{name}.__code__ = other\n\n\n{head}",
    }[how]

    assert edited(newest, head, new).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("@dataclass\nclass PackedSeqParams:", "@dataclass(frozen=True)\nclass PackedSeqParams:"),
        ("class PackedSeqParams:", "class PackedSeqParams(Rows):"),
        ("    cu_seqlens_q_padded: Tensor = None\n", ""),
        ("    cu_seqlens_q_padded: Tensor = None\n", "    cu_seqlens_q_padded: Tensor\n"),
        ("    cu_seqlens_q: Tensor = None\n", "    cu_seqlens_q: Tensor = field(default=None)\n"),
        ("    def __post_init__(self):", "    def __getattribute__(self, name): ...\n\n    def __post_init__(self):"),
        (
            "    def __post_init__(self):",
            "    @property\n    def cu_seqlens_q(self): ...\n\n    def __post_init__(self):",
        ),
    ],
    ids=["frozen", "base", "no field", "no default", "another default", "attributes made up", "property"],
)
def test_parameters_of_another_kind_are_not_recognised(newest: Texts, old: str, new: str) -> None:
    assert edited(newest, old, new, "megatron.core.packed_seq_params").verdict is Verdict.UNRECOGNISED


def test_without_parameters_nothing_is_recognised(newest: Texts) -> None:
    source = newest.module(TARGET.module)
    assert source is not None

    assert ask(probe, Texts({TARGET.module: source.text})).verdict is Verdict.UNRECOGNISED
