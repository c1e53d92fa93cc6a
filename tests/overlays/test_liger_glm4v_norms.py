"""Liger's norms of GLM-4V with the overlay: gradients of a model to which kernels were applied are those of transformers.

The case and the neighbours of pack 63 run in lanes that have transformers, in a process of its own for each. Functions of the newest release are also asked here about
single norms: their module cannot be imported without transformers.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from placed_seams import placed
from releases import newest
from reproduced_pack import assert_repaired, reproduced_in
from unpacked import unpacked

from megacpp_overlays.feature_probes.liger_glm4v_norms import IN_PLACE, TARGET
from megacpp_overlays.loader import probing
from megacpp_overlays.model import Verdict
from megacpp_overlays.overlays.liger_glm4v_norms import OVERLAY
from megacpp_overlays.source.file_trees import DirectoryTree

pytestmark = pytest.mark.upstream

NEWEST = newest("liger-kernel")
FUNCTIONS = {TARGET.symbol, "_bind_method_to_module"}


@pytest.mark.parametrize("lane", ["mamba3-pinned", pytest.param("edge", marks=pytest.mark.full)])
def test_a_release_is_broken_without_the_overlay_and_right_with_it(lane: str) -> None:
    assert_repaired(reproduced_in(lane, "63", TRITON_INTERPRET="1"))


@pytest.mark.parametrize(
    ("version", "verdict"), [("0.6.1", Verdict.ABSENT), ("0.6.2", Verdict.BROKEN), (NEWEST, Verdict.BROKEN)]
)
def test_it_is_about_releases_that_know_the_model(
    wheel: Callable[[str, str], Path], version: str, verdict: Verdict
) -> None:
    tree = DirectoryTree(unpacked(wheel("liger-kernel", version)))

    assert probing.examine(OVERLAY, tree).verdict is verdict


# Single norms


class ModulesToSaveWrapper(torch.nn.Module):
    """PEFT's wrapper of a module that is trained in a copy."""

    def __init__(self, original: torch.nn.Module, copy: torch.nn.Module) -> None:
        super().__init__()
        self.original_module = original
        self.modules_to_save = torch.nn.ModuleDict({"default": copy})


@pytest.fixture(scope="module")
def stock(wheel: Callable[[str, str], Path]) -> ModuleType:
    """The functions of the newest release, in a module of their own."""
    source = DirectoryTree(unpacked(wheel("liger-kernel", NEWEST))).module(TARGET.module)
    assert source is not None
    functions = [each for each in source.syntax.body if isinstance(each, ast.FunctionDef) and each.name in FUNCTIONS]
    assert len(functions) == len(FUNCTIONS)
    found = ModuleType(TARGET.module)
    peft = SimpleNamespace(utils=SimpleNamespace(other=SimpleNamespace(ModulesToSaveWrapper=ModulesToSaveWrapper)))
    norm = type("LigerRMSNorm", (torch.nn.Module,), {})
    vars(found).update(MethodType=MethodType, PEFT_AVAILABLE=True, peft=peft, LigerRMSNorm=norm)
    exec(compile(ast.Module([*functions], []), source.path, "exec"), vars(found))
    return found


@pytest.fixture
def apply(stock: ModuleType) -> Iterator[Callable[..., None]]:
    """The function that applies the kernel to a norm, with the seam."""
    with placed(OVERLAY, IN_PLACE, stock):
        yield getattr(stock, TARGET.symbol)


def norm(name: str = "Glm4vRMSNorm", **attributes: Any) -> Any:
    found = type(name, (torch.nn.Module,), {})()
    vars(found).update(attributes)
    return found


def test_the_self_test_sees_the_defect_and_its_absence(stock: ModuleType) -> None:
    assert OVERLAY.self_test(stock).broken
    with placed(OVERLAY, IN_PLACE, stock):
        assert not OVERLAY.self_test(stock).broken


@pytest.mark.parametrize("asked", [{}, {"in_place": True}, {"in_place": False}])
def test_a_norm_of_the_model_writes_elsewhere_and_is_else_as_asked(apply: Callable[..., None], asked: Any) -> None:
    found = norm(variance_epsilon=1e-5)

    apply(found, 1.0, casting_mode="gemma", **asked)

    assert (found.in_place, found.offset, found.variance_epsilon, found.casting_mode) == (False, 1.0, 1e-5, "gemma")


def test_a_norm_that_a_user_derives_from_it_writes_elsewhere(apply: Callable[..., None]) -> None:
    found = type("Own", (type(norm()),), {})()

    apply(found)

    assert found.in_place is False


def test_both_norms_in_a_wrapper_of_peft_write_elsewhere(apply: Callable[..., None]) -> None:
    original, copy = norm(), norm()

    apply(ModulesToSaveWrapper(original, copy))

    assert (original.in_place, copy.in_place) == (False, False)


def test_a_norm_that_was_built_after_liger_s_classes_were_in_goes_on_as_it_was(apply: Callable[..., None]) -> None:
    found = norm("LigerRMSNormForGlm4", in_place=False)

    apply(found)

    assert found.in_place is False


@pytest.mark.parametrize("name", ["Qwen3RMSNorm", "Glm4vMoeTextRMSNorm", "LlamaRMSNorm"])
@pytest.mark.parametrize("in_place", [True, False])
def test_norms_of_other_models_are_as_asked(apply: Callable[..., None], name: str, in_place: bool) -> None:
    found = norm(name)

    apply(found, in_place=in_place)

    assert found.in_place is in_place


def test_an_object_that_is_no_module_of_torch_is_left_to_upstream(
    apply: Callable[..., None], stock: ModuleType
) -> None:
    found = SimpleNamespace()

    apply(found)

    assert found.in_place is True
