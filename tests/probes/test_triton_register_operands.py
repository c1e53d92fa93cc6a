"""The gate of pack 43: the installed compiler, and whether this host is known to have a GPU for which it matters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from installed import Edited, tree_of
from probing import ask, parsed_once

from megacpp_overlays.feature_probes.triton_register_operands import WRITTEN_AGAIN, probe
from megacpp_overlays.loader import probing
from megacpp_overlays.loader.settings import Settings
from megacpp_overlays.model import Verdict
from megacpp_overlays.overlays.triton_register_operands import OVERLAY
from megacpp_overlays.runtime import gpus
from megacpp_overlays.source.file_trees import DirectoryTree

pytestmark = pytest.mark.upstream

FILE = "triton/backends/nvidia/compiler.py"
RIGHT = ("3.3.1", "3.7.0", "3.7.1", "3.8.0", "3.9.0")
WRONG = ("3.4.0", "3.5.0", "3.5.1", "3.6.0")


@pytest.mark.parametrize("version", RIGHT + WRONG)
def test_the_verdict_on_each_release(version: str, wheel: Callable[[str, str], Path]) -> None:
    found = ask(probe, parsed_once(wheel("triton", version)))

    assert (found.verdict, found.shape) == (
        (Verdict.BROKEN, WRITTEN_AGAIN) if version in WRONG else (Verdict.FIXED, None)
    )
    assert version in found.summary()


def test_every_broken_shape_has_advice() -> None:
    assert set(OVERLAY.unsupported) == {WRITTEN_AGAIN}


@pytest.mark.parametrize("lane", ["newest", "edge"])
@pytest.mark.parametrize(
    "edit",
    [
        {"import functools": "import functools\nimport our_assembler"},
        {"def get_ptxas(": "def get_assembler("},
        {"class CUDABackend(BaseBackend):": "class CUDABackend(OurBackend):"},
    ],
    ids=["an import", "a name", "a base"],
)
def test_a_compiler_that_was_not_measured_is_not_recognised(lane: str, edit: dict[str, str]) -> None:
    assert ask(probe, Edited(tree_of(lane), FILE, edit)).verdict is Verdict.UNRECOGNISED


def test_without_triton_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert ask(probe, DirectoryTree(tmp_path)).verdict is Verdict.ABSENT


@pytest.mark.parametrize(
    ("there", "verdict"),
    [
        (frozenset({(9, 0)}), Verdict.BROKEN),
        (frozenset({(8, 0), (9, 0)}), Verdict.BROKEN),
        (frozenset({(8, 0)}), Verdict.ABSENT),
        (frozenset({(10, 0)}), Verdict.ABSENT),
        (None, Verdict.ABSENT),
    ],
)
def test_it_matters_where_there_is_a_hopper_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, there: frozenset[tuple[int, int]] | None, verdict: Verdict
) -> None:
    monkeypatch.setattr(gpus, "capabilities", lambda: there)

    assert probing.examine_installed(OVERLAY, tree_of("newest"), Settings()).verdict is verdict


def test_a_release_that_is_right_is_due_on_every_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "capabilities", lambda: None)

    assert probing.examine_installed(OVERLAY, tree_of("edge"), Settings()).verdict is Verdict.FIXED
