"""Import Transformer Engine without its compiled half: the Python files of the release, as they are installed.

Megatron's classes over Transformer Engine and everything that replaces methods of them exist only where its Python half can
be imported. That asks for two compiled libraries. `without_compiled_half()` puts a module with the right enumerations in the place of one,
and keeps the other from being loaded. A call of anything compiled raises.
"""

from __future__ import annotations

import ast
import enum
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

EXTENSION = "transformer_engine_torch"
COMMON = "transformer_engine.common"
ENUMERATIONS = {
    "DType": ("transformer_engine/pytorch/constants.py", "DType", ""),
    "NVTE_Fused_Attn_Backend": ("transformer_engine/pytorch/cpp_extensions/fused_attn.py", "FusedAttnBackend", "NVTE_"),
}
"""Enumerations of the extension that Python has a copy of: its file, its class, and a prefix of the extension's names."""


class CompiledCodeError(RuntimeError):
    """Raised where something compiled is called."""


class CompiledName:
    """A name of the extension, or one in it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> CompiledName:
        return compiled(name, self.name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raise: it is not here."""
        raise CompiledCodeError(f"{self.name} is compiled, and only the Python half is here")

    def __int__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompiledName) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


def compiled(name: str, of: str = EXTENSION) -> CompiledName:
    """Return a name of the extension; Python's own names are not there."""
    if name.startswith("__"):
        raise AttributeError(name)
    return CompiledName(f"{of}.{name}")


class LibraryLoader(importlib.abc.Loader):
    """Executes `transformer_engine.common`, and takes from it the function that loads the extension."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Return the result of the wrapped loader."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module."""
        self.loader.exec_module(module)
        vars(module)["load_framework_extension"] = lambda _: None


class LibraryFinder(importlib.abc.MetaPathFinder):
    """Finds `transformer_engine.common`, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of the module with a loader of this kind."""
        if fullname != COMMON:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LibraryLoader(spec.loader)
        return spec


def without_compiled_half() -> None:
    """Let this process import the Python half of the Transformer Engine that is installed."""
    extension = ModuleType(EXTENSION)
    vars(extension).update({name: _enumeration(name, *each) for name, each in ENUMERATIONS.items()})
    vars(extension)["__getattr__"] = compiled
    sys.modules[EXTENSION] = extension
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # upstream's own switch: load no library
    sys.meta_path.insert(0, LibraryFinder())


def _enumeration(name: str, file: str, cls: str, prefix: str) -> Any:
    """Return an enumeration with the members of a class of the Python half, which compares them when it is imported."""
    syntax = ast.parse(importlib.metadata.distribution("transformer-engine").locate_file(file).read_text())
    (found,) = (node for node in syntax.body if isinstance(node, ast.ClassDef) and node.name == cls)
    members = [prefix + ast.unparse(node.targets[0]) for node in found.body if isinstance(node, ast.Assign)]
    return enum.IntEnum(name, members, start=0)
