"""Stand-ins of upstream modules: each has the names, signatures and structure of the module that it imitates.

Each is compared with the given trees in which a probe has the same finding as in the stand-in. They follow Megatron-LM
dev d48bd6be0a (dev-linear-cross-entropy), the head of pull request 3345 (pr3345-linear-cross-entropy) and main
0ff7226f6d of 2026-06-27 (dsa-june). No commit of that repository has the files of spring that the others imitate.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from outlines import differences, imitated
from probing import Texts
from trees import STAND_INS

from megacpp_overlays.loader import registry
from megacpp_overlays.source.file_trees import DirectoryTree


@pytest.mark.parametrize("name", STAND_INS)
def test_a_stand_in_has_the_outline_of_a_given_tree_with_its_shapes(name: str, upstream_trees: list[Path]) -> None:
    errata = [each for each in registry.load() if each.target.distribution == "megatron-core"]
    stand_in = DirectoryTree(STAND_INS[name])
    modules = {path: imitated(errata, stand_in, DirectoryTree(path)) for path in upstream_trees}
    if not any(modules.values()):
        pytest.skip(f"no --upstream-tree has a shape of {name}")

    found = {path: [differences(stand_in, DirectoryTree(path), each) for each in modules[path]] for path in modules}

    assert not any(line for lines in found.values() for each in lines for line in each), found


ENTRY = """
import logging

try:
    import kernels

    def forward(hidden, weight, labels=None):
        return kernels.forward(hidden, weight, labels)

except ImportError:
    logging.warning("there are no kernels")


class Layer(Base):
    @staticmethod
    def run(x):
        return x
"""


def compared(text: str) -> list[str]:
    return differences(Texts({"package.entry": text}), Texts({"package.entry": ENTRY}), "package.entry")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    import kernels\n\n    def forward", "    pass\nexcept OSError:\n    def forward"),
        ("labels=None", "labels"),
        ("labels=None", "labels=None, *, reduction='mean'"),
        ("    @staticmethod\n", ""),
        ("(Base)", ""),
        ("def run(", "async def run("),
        ("class Layer", "def helper(): pass\n\n\nclass Layer"),
        ("class Layer", "class Other"),
    ],
)
def test_a_change_that_a_probe_or_a_caller_can_see_is_a_difference(old: str, new: str) -> None:
    assert old in ENTRY
    assert len(compared(ENTRY.replace(old, new))) > 0


def test_a_definition_outside_its_try_is_a_difference() -> None:
    tried = ENTRY[ENTRY.index("    def forward") : ENTRY.index("except ImportError")]
    plain = tried.replace("\n    ", "\n").replace("    def", "def", 1)

    (found,) = compared(ENTRY.replace(tried, "").replace("class Layer", f"{plain}class Layer"))

    assert "Try.body" in found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return x\n", "return x + 1\n"),
        ("class Layer", "def _helper(): pass\n\n\nclass Layer"),
        ("hidden, weight, labels=None", "hidden: Tensor, weight, labels: Tensor | None = None"),
    ],
)
def test_bodies_annotations_and_private_helpers_of_its_own_are_none(old: str, new: str) -> None:
    assert compared(ENTRY.replace(old, new, 1)) == []
