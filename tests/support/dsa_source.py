"""Functions of an upstream tree as plain functions, and edits of its text, shared by the DSA and GDN tests."""

from __future__ import annotations

import ast
import enum
import functools
import itertools
import marshal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from trees import STAND_INS

from megacpp_overlays.loader import live_names, seams
from megacpp_overlays.loader.probing import examine
from megacpp_overlays.model import Overlay, Verdict
from megacpp_overlays.source.file_trees import DirectoryTree
from megacpp_overlays.source.trees import ModuleSource, SourceTree

_numbers = itertools.count()


class EditedTree:
    """A tree in which one module has another text."""

    def __init__(self, tree: SourceTree, name: str, text: str) -> None:
        self._tree, self._edited = tree, ModuleSource(name, "edited.py", text)

    def module(self, name: str) -> ModuleSource | None:
        return self._edited if name == self._edited.name else self._tree.module(name)


def text_of(tree: SourceTree, name: str) -> str:
    source = tree.module(name)
    assert source is not None
    return source.text


def statement_edits(text: str, symbol: str) -> Iterator[tuple[str, str]]:
    """Yield a text for every statement of a function: without it, and with it twice."""
    for position in range(len(_statements(ast.parse(text), symbol))):
        for times in (0, 2):
            syntax = ast.parse(text)
            block, place = _statements(syntax, symbol)[position]
            said = ast.unparse(block[place]).partition("\n")[0]
            block[place : place + 1] = [block[place]] * times or [ast.Pass()]
            yield f"{times} x {said}", ast.unparse(ast.fix_missing_locations(syntax))


def _statements(syntax: ast.Module, symbol: str) -> list[tuple[list[ast.stmt], int]]:
    scope: Any = syntax
    for part in symbol.split("."):
        scope = next(node for node in scope.body if getattr(node, "name", None) == part)
    blocks = [
        block
        for node in ast.walk(scope)
        for block in (getattr(node, "body", None), getattr(node, "orelse", None))
        if isinstance(block, list)
    ]
    return [
        (block, place)
        for block in blocks
        for place, each in enumerate(block)
        if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
    ]


class AttnMaskType(enum.Enum):
    """Megatron's, as far as DSA asks."""

    causal = 2


def trees(metafunc: pytest.Metafunc, fixture: str, *stand_ins: str) -> None:
    """Parametrize tests that take a fixture with the named stand-ins and every given tree."""
    if fixture in metafunc.fixturenames:
        paths = [STAND_INS[name] for name in stand_ins]
        given: list[Path] = [path.resolve() for path in metafunc.config.getoption("--upstream-tree")]
        metafunc.parametrize(fixture, paths + given, ids=[*stand_ins, *(f"upstream-{path.name}" for path in given)])


def module_of(tree: Path | SourceTree, name: str, *only: str) -> ModuleType:
    """Return the top-level functions of a module, or some, executed without the module's imports from Megatron.

    A DSA masking module finds the layout module of the same tree.
    """
    tree = DirectoryTree(tree) if isinstance(tree, Path) else tree
    source = tree.module(name)
    assert source is not None
    # A name of its own: a compiler looks modules up by name, and remembers them.
    module = ModuleType(f"{name.rpartition('.')[2]}_{next(_numbers)}")
    vars(module).update(torch=torch, AttnMaskType=AttnMaskType, get_pg_size=lambda group: group.size())
    if name.endswith("dsa_masking"):
        vars(module)["dsa_layout"] = module_of(tree, name.replace("masking", "layout"))
    exec(marshal.loads(_functions(source.text, source.path, only)), vars(module))
    return module


@functools.cache
def _functions(text: str, path: str, only: tuple[str, ...]) -> bytes:
    """Return marshalled code that defines the functions of a module; each execution makes code objects of its own."""
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    functions = [node for node in functions if not only or node.name in only]
    return compiled("\n".join(map(ast.unparse, functions)), path)


def compiled(text: str, path: str) -> bytes:
    return marshal.dumps(compile(f"from __future__ import annotations\n{text}", path, "exec"))


def install(part: Overlay, shape: str, module: ModuleType) -> Callable[[], None]:
    """Put in the seams of a shape; return a function that removes them."""
    placed = []
    for replacement in part.replacements[shape]:
        owner, name = live_names.resolve(module, replacement.symbol)
        make = replacement.make
        placed.append(seams.replace(owner, name, lambda f, make=make: make(f, module), overlay_id=part.id))

    def undo() -> None:
        for seam in reversed(placed):
            assert seam.undo()

    return undo


def verdicts(parts: tuple[Overlay, ...], tree: SourceTree) -> dict[str, str]:
    """Return verdict or shape by module, without the modules that are absent."""
    found = {part.target.module.rpartition(".")[2]: examine(part, tree) for part in parts}
    return {
        name: each.shape or each.verdict.value for name, each in found.items() if each.verdict is not Verdict.ABSENT
    }
