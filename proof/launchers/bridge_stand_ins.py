"""Names that an import of megatron-bridge asks for and nothing computes with; imported before it.

megatron-bridge imports its LoRA layers whatever is trained, and they annotate with a class of Transformer Engine; its
`pretrain` annotates with a class of nvidia-resiliency-ext. Where such a package is missing, names stand in for it while the one
module that asks is executed. Before and after, and for all others, it is missing: Megatron asks, too, and must not find it.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any


class Nothing:
    """A class that is only named."""


TRANSFORMER_ENGINE: dict[str, dict[str, Any]] = {
    "transformer_engine": {},
    "transformer_engine.pytorch": {"ops": SimpleNamespace(Sequential=Nothing)},
}
RESILIENCY: dict[str, dict[str, Any]] = {
    "nvidia_resiliency_ext": {},
    "nvidia_resiliency_ext.inprocess": {"CallWrapper": Nothing},
}
ASKED = {
    "megatron.bridge.peft.lora_layers": TRANSFORMER_ENGINE,
    "megatron.bridge.training.pretrain": RESILIENCY,
}
"""What stands in, by the module that asks for it."""


@contextlib.contextmanager
def standing_in(names: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Let modules of these names be found, and nothing else be different."""
    for name, attributes in names.items():
        sys.modules[name] = module = ModuleType(name)
        vars(module).update(attributes)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


class Loader(importlib.abc.Loader):
    """The loader of a module, with names that stand in while it executes that."""

    def __init__(self, loader: importlib.abc.Loader, names: Mapping[str, Mapping[str, Any]]) -> None:
        self.loader = loader
        self.names = names

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Return what the other would."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module."""
        with standing_in(self.names):
            self.loader.exec_module(module)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that ask, as Python would."""

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a module's spec with a loader of this kind, if what it asks for is missing."""
        names = ASKED.get(fullname)
        if names is None or importlib.util.find_spec(next(iter(names))) is not None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader, names)
        return spec


sys.meta_path.insert(0, Finder())
