"""The probe of pack 10 on stand-ins, real trees, releases, and edited code."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from probing import ask
from trees import STAND_INS

from megacpp_overlays.feature_probes import hopper_flce_dispatch as feature
from megacpp_overlays.model import Verdict
from megacpp_overlays.overlays.hopper_flce_dispatch import OVERLAY
from megacpp_overlays.source.file_trees import DirectoryTree

DEV, PR3345 = STAND_INS["dev-linear-cross-entropy"], STAND_INS["pr3345-linear-cross-entropy"]
TARGET = Path("megatron/core/fusions/fused_linear_cross_entropy.py")
ENTRY = Path("megatron/core/fusions/linear_cross_entropy/blackwell/entry.py")


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., DirectoryTree]:
    """Return a copy of the stand-in for dev with one piece of text replaced."""

    def edit(old: str, new: str, file: Path = TARGET) -> DirectoryTree:
        shutil.copytree(DEV, tmp_path, dirs_exist_ok=True)
        text = (tmp_path / file).read_text()
        assert old in text
        (tmp_path / file).write_text(text.replace(old, new))
        return DirectoryTree(tmp_path)

    return edit


@pytest.mark.parametrize(
    ("dispatcher", "shape"),
    [(DEV, feature.BLACKWELL_ONLY), (PR3345, feature.BLACKWELL_AND_HOPPER)],
    ids=["dev", "pr3345"],
)
def test_a_dispatcher_that_lacks_branches_is_broken(dispatcher: Path, shape: str) -> None:
    found = ask(feature.probe, DirectoryTree(dispatcher))

    assert (found.verdict, found.shape) == (Verdict.BROKEN, shape)
    assert shape in OVERLAY.replacements
    assert ask(OVERLAY.probe, DirectoryTree(dispatcher)).verdict is not Verdict.FIXED


def test_every_tree_is_recognised(tree: Path) -> None:
    found = ask(feature.probe, DirectoryTree(tree))

    assert found.verdict is not Verdict.UNRECOGNISED, found.summary()
    assert (found.verdict is Verdict.ABSENT) == (not (tree / TARGET).exists())


def test_a_tree_without_the_module_has_no_dispatcher(tmp_path: Path) -> None:
    assert ask(feature.probe, DirectoryTree(tmp_path)).verdict is Verdict.ABSENT


def test_another_module_of_that_name_has_no_dispatcher(tmp_path: Path) -> None:
    """As in pull request 4312."""
    (tmp_path / TARGET).parent.mkdir(parents=True)
    (tmp_path / TARGET).write_text("def fused_linear_cross_entropy(x, weight, labels): ...\n")

    found = ask(feature.probe, DirectoryTree(tmp_path))

    assert (found.verdict, found.summary()) == (
        Verdict.ABSENT,
        "defines no Platform (fused_linear_cross_entropy.py)",
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("capability[0] == 10", "capability[0] in (8, 9, 10, 12)"),
        ("capability[0] == 10", "capability[0] in (8, 10)"),
        ("capability[0] == 10", "capability[0] >= 10"),
        ("capability[0] == 10", "capability == (10, 0)"),
        ("capability[0] == 10", "name[0] == 10"),
        ("        if capability[0]", "        capability = (10, 0)\n        if capability[0]"),
        ("        if capability[0]", "        if capability[0] > 10:\n            return\n        if capability[0]"),
        ("        if capability[0]", "        for _ in ():\n            pass\n        if capability[0]"),
        ("            raise ValueError(", "            print("),
        ("raise ValueError(", "raise RuntimeError("),
        ("linear_cross_entropy.blackwell import entry", "other.blackwell import entry"),
        ("        self._initialized = True\n", "        self._initialized = self.extra_func = 1\n"),
        ("    def __init__(self):\n", "    def close(self): ...\n\n    def __init__(self):\n"),
        ("    def __init__(self):\n", "    def __init__(self, kind=None):\n"),
        ("class Platform:", "class Platform(dict):"),
        ("@lru_cache(maxsize=1)\n", ""),
        ("    return Platform()\n", "    return Platform() if True else None\n"),
        ("def _get_platform():", "def _get_platform(device=None):"),
        ("class LinearCrossEntropy(", "other = Platform()\n\n\nclass LinearCrossEntropy("),
        ("class LinearCrossEntropy(", "getter = _get_platform\n\n\nclass LinearCrossEntropy("),
        ("@lru_cache(maxsize=1)", "Platform = print\n\n\n@lru_cache(maxsize=1)"),
        ("@lru_cache(maxsize=1)", "Platform.__init__ = print\n\n\n@lru_cache(maxsize=1)"),
        ("@lru_cache(maxsize=1)", "setattr(Platform, 'x', 1)\n\n\n@lru_cache(maxsize=1)"),
        ("import torch\n", "import torch\nfrom other import Platform\n"),
        ("        ignore_index=-100,\n", "        ignore_index=-100,\n        z_loss=0.0,\n"),
        ("tp_group, reduction, ignore_index, sequence_parallel\n            )", "tp_group, reduction\n            )"),
        ("loss, top, total, kept, ctx.rank", "loss, top, total, kept, extra, ctx.rank"),
        ("                tp_world_size,\n", "                tp_world_size + 0,\n"),
        ("for_hidden, for_weight = ", "for_hidden, for_weight, _ = "),
    ],
)  # fmt: skip
def test_an_edit_of_meaning_is_not_recognised(edited: Callable[..., DirectoryTree], old: str, new: str) -> None:
    assert ask(feature.probe, edited(old, new)).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    "test",
    [
        "capability[0] >= 8",
        "capability[0] == 9 or capability[0] == 12 or capability[0] == 8",
        "capability >= (8, 0)",
        "capability == (9, 0)",
        "HAVE_TRITON and capability[0] == 9",
    ],
)
def test_a_second_branch_that_asks_otherwise_is_not_recognised(edited: Callable[..., DirectoryTree], test: str) -> None:
    """It may be the repair, so BROKEN would be as wrong as FIXED."""
    branch = f"        elif {test}:\n            from .linear_cross_entropy.other import entry\n        else:\n            raise"

    found = ask(feature.probe, edited("        else:\n            raise", branch))

    assert found.verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (TARGET, "        return loss\n", "        return loss / labels.numel()\n"),
        (TARGET, "return for_hidden, for_weight,", "return for_hidden / len(labels), for_weight,"),
        (TARGET, "    return LinearCrossEntropy.apply(", "    return 0.5 * LinearCrossEntropy.apply("),
        (ENTRY, '    raise NotImplementedError("the', '    return sums("the'),
    ],
    ids=["divided later", "gradient divided later", "divided by the caller", "sums"],
)
def test_who_divides_a_sum_is_a_part_of_the_contract(
    edited: Callable[..., DirectoryTree], file: Path, old: str, new: str
) -> None:
    """An entry that returns sums, which are divided later, has the names of the contract and not its numbers."""
    assert ask(feature.probe, edited(old, new, file)).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("old", "new"),
    [("sequence_parallel=False):", "sequence_parallel=False, z_loss=0.0):"), ("    accu,\n", "    lse,\n")],
    ids=["forward", "backward"],
)
def test_an_entry_with_another_contract_is_not_recognised(
    edited: Callable[..., DirectoryTree], old: str, new: str
) -> None:
    found = ask(feature.probe, edited(old, new, ENTRY))

    assert found.verdict is Verdict.UNRECOGNISED
    assert "blackwell.entry" in found.summary()


def test_a_dispatcher_without_the_entry_it_names_is_not_recognised(edited: Callable[..., DirectoryTree]) -> None:
    tree = edited("Platform", "Platform")
    (tree.root / ENTRY).unlink()

    assert ask(feature.probe, tree).verdict is Verdict.UNRECOGNISED
