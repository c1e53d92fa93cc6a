"""Transformer Engine without its compiled half: the Python part of a released wheel, loaded straight from the file.

Its compiled extension is replaced by a module that has the enumerations and raises for everything else, and the two
packages whose `__init__` would load native libraries are imported without running it. The rest is upstream's own Python: the
tensor classes, their dispatch and their autograd functions. Nothing here is in a test's own process for longer than
`loaded` lasts.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import importlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

EXTENSION = "transformer_engine_torch"
PACKAGES = ("transformer_engine", "transformer_engine.common", "transformer_engine.pytorch")
REQUESTS = "transformer_engine.pytorch.quantization"
DTYPES = "kByte kInt16 kInt32 kInt64 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat8E8M0 kFloat4E2M1"
CLASSES = {
    "Float8Tensor": "float8_tensor",
    "MXFP8Tensor": "mxfp8_tensor",
    "Float8BlockwiseQTensor": "float8_blockwise_tensor",
    "NVFP4Tensor": "nvfp4_tensor",
    "HybridQuantizedTensor": "hybrid_tensor",
    "IdentityTensor": "identity_tensor",
}


class NeedsExtensionError(RuntimeError):
    """Raised where upstream calls its compiled half."""


class _MissingName:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _MissingName(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NeedsExtensionError(self._name)

    def __int__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _MissingName) and other._name == self._name

    def __hash__(self) -> int:
        return hash(self._name)


def _extension(members: list[str]) -> ModuleType:
    module = ModuleType(EXTENSION)
    module.DType = enum.IntEnum("DType", members, start=0)  # type: ignore[attr-defined]
    # Up to 2.10; later releases do not ask for it.
    formats = enum.IntEnum("Float8BlockScaleTensorFormat", ["GEMM_READY", "COMPACT"], start=0)
    module.Float8BlockScaleTensorFormat = formats  # type: ignore[attr-defined]
    module.__getattr__ = _missing  # type: ignore[method-assign]
    return module


def _missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _MissingName(name)


@contextlib.contextmanager
def loaded(wheel: Path) -> Iterator[SimpleNamespace]:
    """Load the tensor classes of a wheel; yield them by name, with `tex`, the extension's replacement."""
    before = dict(sys.modules)
    replaced = {EXTENSION: _extension(_members(wheel)), "pydantic": ModuleType("pydantic")}
    replaced["pydantic.dataclasses"] = ModuleType("pydantic.dataclasses")
    replaced["pydantic.dataclasses"].dataclass = dataclasses.dataclass  # type: ignore[attr-defined]
    for name in PACKAGES:
        replaced[name] = ModuleType(name)
        replaced[name].__path__ = [f"{wheel}/{name.replace('.', '/')}"]
    # Tensors want one class of this module, which imports half of the package.
    replaced[REQUESTS] = ModuleType(REQUESTS)
    replaced[REQUESTS].QuantizerRequest = type("QuantizerRequest", (), {})  # type: ignore[attr-defined]
    replaced["transformer_engine.common"].__getattr__ = _missing  # type: ignore[method-assign]
    sys.modules.update(replaced)
    current_device = torch.cuda.current_device
    torch.cuda.current_device = lambda: torch.device("cpu")  # upstream's default where no device is given
    try:
        # Up to 2.9 the modules import this from the package itself.
        replaced["transformer_engine.pytorch"].torch_version = lambda: (2, 11)  # type: ignore[attr-defined]
        found = SimpleNamespace(tex=replaced[EXTENSION])
        for cls, module in CLASSES.items():
            with contextlib.suppress(ModuleNotFoundError):  # not in this release yet
                holder = importlib.import_module(f"transformer_engine.pytorch.tensor.{module}")
                setattr(found, cls, getattr(holder, cls))
                quantizer = cls.removesuffix("Tensor").removesuffix("Quantized") + "Quantizer"
                setattr(found, quantizer, getattr(holder, quantizer, None))
        yield found
    finally:
        torch.cuda.current_device = current_device
        for name in [
            name for name in sys.modules if name not in before and name.startswith(("transformer_eng", "pydan"))
        ]:
            del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if name in replaced})


def _members(wheel: Path) -> list[str]:
    """Return the names of the extension's data types; since 2.17 Python has a copy, whose names must agree."""
    with zipfile.ZipFile(wheel) as archive:
        constants = ast.parse(archive.read("transformer_engine/pytorch/constants.py"))
    for node in constants.body:
        if isinstance(node, ast.ClassDef) and node.name == "DType":
            return [ast.unparse(each.targets[0]) for each in node.body if isinstance(each, ast.Assign)]
    return DTYPES.split()
