"""Notes about tensors: they belong to one object and not to its content. No module keeps state on a tensor or by its version instead."""

from __future__ import annotations

import ast
import gc
from typing import Any

import pytest
import torch
from places import ROOT
from tensor_writes import COPIES, Copy

from megacpp_overlays.runtime.tensor_notes import TensorNotes


def test_a_note_is_of_one_tensor_and_not_of_its_equals() -> None:
    notes: TensorNotes[str] = TensorNotes()
    tensor = torch.zeros(2)
    assert notes.get(tensor) is None

    notes.set(tensor, "first")
    notes.set(torch.zeros(2), "other")
    notes.set(tensor, "second")

    assert notes.get(tensor) == "second"
    assert notes.get(torch.zeros(2)) is None
    assert notes.get(tensor.view(2)) is None


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_a_copy_has_no_note_and_nothing_is_written_on_the_tensor(make_copy: Copy) -> None:
    notes: TensorNotes[str] = TensorNotes()
    tensor = torch.zeros(2)
    notes.set(tensor, "noted")

    assert notes.get(make_copy(tensor)) is None
    assert vars(tensor) == {}


def test_a_note_ends_with_its_tensor() -> None:
    notes: TensorNotes[Any] = TensorNotes()
    ended: list[int] = []

    class Note:
        def __del__(self) -> None:
            ended.append(1)

    tensor = torch.zeros(2)
    notes.set(tensor, Note())
    del tensor
    gc.collect()

    assert ended == [1]


def test_a_note_goes_with_tensors_that_autograd_saves_for_the_backward_pass() -> None:
    notes: TensorNotes[str] = TensorNotes()
    found: list[str | None] = []

    class TwoResults(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
            saved = torch.zeros(2)
            notes.set(saved, "forward")
            ctx.save_for_backward(saved)
            return values * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            found.append(notes.get(*ctx.saved_tensors))
            return gradients[0] * 2

    TwoResults.apply(torch.ones(2, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]

    assert found == ["forward"]


# The sources of all that runs in a process of others

NOTES = ROOT / "megacpp_overlays/runtime/tensor_notes.py"
SOURCES = {
    str(each.relative_to(ROOT)): ast.parse(each.read_text())
    for pattern in (
        "overlays/*.py",
        "megacpp_overlays/runtime/*.py",
        "megacpp_overlays/kernels/**/*.py",
        "megacpp_overlays/fp*.py",
    )
    for each in sorted(ROOT.glob(pattern))
    if each != NOTES
}
HASHED_BY_VALUE = {"int", "torch.dtype", "torch.device", "TileWave"}
"""Types that a cached function may take: a tensor is hashed by its identity, whatever it holds."""
BY_OPTIMIZER = "overlays/fully_reshardable_padding.py: WeakKeyDictionary"
"""Shapes of the state that an optimizer is about to load: no numbers, and no tensor is a key."""
UPSTREAM_S_OWN = {"keep_in_fp32", "qkv_split_shapes"}
"""Attributes of parameters that Megatron itself defines."""


def words_of(node: ast.AST) -> set[str]:
    """Return the names, attributes and imports in some code."""
    nodes = list(ast.walk(node))
    names = {each.id for each in nodes if isinstance(each, ast.Name)}
    imported = {each.name for each in nodes if isinstance(each, ast.alias)}
    return names | imported | {each.attr for each in nodes if isinstance(each, ast.Attribute)}


def functions_of(source: ast.Module) -> list[ast.FunctionDef]:
    return [each for each in ast.walk(source) if isinstance(each, ast.FunctionDef)]


def test_no_module_asks_for_the_version_of_a_tensor() -> None:
    """PyTorch does not count every write."""
    assert [path for path, source in SOURCES.items() if "_version" in words_of(source)] == []


def test_no_module_has_another_mapping_by_objects() -> None:
    """State of a call is kept for as long as the call lasts."""
    found = {
        f"{path}: {word}"
        for path, source in SOURCES.items()
        for word in words_of(source)
        if word.endswith("KeyDictionary")
    }

    assert found == {BY_OPTIMIZER}


def test_cached_results_depend_on_values_alone() -> None:
    cached = {
        f"{path}: {each.name}": {ast.unparse(one.annotation) for one in each.args.args if one.annotation is not None}
        for path, source in SOURCES.items()
        for each in functions_of(source)
        if any("cache" in word for decorator in each.decorator_list for word in words_of(decorator))
    }

    assert len(cached) > 10
    assert {where: taken for where, taken in cached.items() if not taken <= HASHED_BY_VALUE} == {}


def test_attributes_are_written_on_functions_modules_and_contexts_and_not_on_tensors() -> None:
    """A context belongs to one call of an autograd function, and is never copied or saved."""
    found = {
        f"{path}: {ast.unparse(call)}"
        for path, source in SOURCES.items()
        for call in ast.walk(source)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "setattr"
        if (name := constant_of(source, call.args[1])) is not None and name not in UPSTREAM_S_OWN
        if ast.unparse(call.args[0])
        not in {"ctx", "cls", "module", "model", *(each.name for each in functions_of(source))}
    }

    assert found == set()


def constant_of(source: ast.Module, name: ast.expr) -> object:
    """Return the value of a constant expression, or of a constant that the module assigns to it, or None."""
    if isinstance(name, ast.Constant):
        return name.value
    constants = {
        ast.unparse(target): each.value.value
        for each in source.body
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant)
        for target in each.targets
    }
    return constants.get(ast.unparse(name))
