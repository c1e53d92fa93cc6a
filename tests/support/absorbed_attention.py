"""Absorbed DSA attention of an upstream tree as a module of plain functions, and calls of it, shared by its tests."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from dsa_source import module_of
from torch.utils._python_dispatch import TorchDispatchMode

from megacpp_overlays.feature_probes import dsa_sparse_attention as feature
from megacpp_overlays.source.file_trees import ArchiveTree

ROWS, BATCH, HEADS, KEYS, DIM, VALUE, SLOTS = 9, 2, 40, 11, 6, 4, 5
ALL_SCORES = ROWS * BATCH * HEADS * KEYS
SCALE = 0.4


def attention_of(wheel: Path) -> ModuleType:
    """Return the function of a release and the masks that it asks for, executed without the modules that they import."""
    tree = ArchiveTree(wheel)
    module = module_of(tree, feature.TARGET.module, feature.FUNCTION)
    vars(module)["dsa_masking"] = module_of(tree, feature.MASKING)
    return module


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Return normal numbers that depend on nothing but a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(dtype: torch.dtype = torch.float32, rows: int = ROWS, keys: int = KEYS, seed: int = 0) -> list[Any]:
    """Return query and key as leaves that want gradients."""
    made = numbers(rows, BATCH, HEADS, DIM, seed=seed), numbers(keys, BATCH, 1, DIM, seed=seed + 1)
    return [each.to(dtype).requires_grad_() for each in made]


def choices(rows: int = ROWS, keys: int = KEYS, slots: int = SLOTS, seed: int = 3) -> Any:
    """Return a top-k: for each query keys that are all different, or none."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand((BATCH, rows, keys), generator=generator).topk(slots).indices
    chosen[torch.rand(chosen.shape, generator=generator) < 0.2] = -1
    chosen[0, rows // 2] = -1  # a query without any
    return chosen


def additive(*shape: int) -> Any:
    """Return a mask of finite numbers, of infinities of both signs, and of NaN."""
    mask = numbers(*shape, seed=5)
    mask[mask > 0.8] = -torch.inf
    mask[..., 1, 2], mask[..., 2, 1] = torch.inf, torch.nan
    return mask


MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "bounds": {
        "varlen_starts": torch.tensor([0, 0, 0, 3, 3, 3, 3, 7, 7]),
        "varlen_ends": torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 11]),
    },
    "bounds of int32": {
        "varlen_starts": torch.zeros(ROWS, dtype=torch.int32),
        "varlen_ends": torch.arange(1, ROWS + 1, dtype=torch.int32),
    },
    "rows of a context parallel rank": {
        "varlen_starts": torch.zeros(ROWS, dtype=torch.int64),
        "varlen_ends": torch.tensor([1, 2, 3, 4, 8, 9, 10, 11, 11]),
        "key_positions": torch.tensor([0, 1, 5, 6, 2, 3, 4, 10, 9, 8, 7]),
    },
    "one mask": {"mask": additive(ROWS, KEYS)},
    "a mask for each": {"mask": additive(BATCH, ROWS, KEYS)},
    "ends alone": {"varlen_ends": torch.full((ROWS,), KEYS)},
}


def called(module: ModuleType, leaves: list[Any], chosen: Any, **masks: Any) -> tuple[Any, list[Any]]:
    """Return the output and the gradients."""
    output = getattr(module, feature.FUNCTION)(*leaves, chosen, SCALE, VALUE, **masks)
    above = numbers(*output.shape, seed=9, dtype=output.dtype)
    return output.detach(), list(torch.autograd.grad(output, leaves, above))


class MostElements(TorchDispatchMode):
    """Notes the most elements that an operator returned, also inside of a custom operator."""

    elements = 0
    _on_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            result = func(*args, **(kwargs or {}))
        else:
            with self:
                result = func.redispatch(self._on_cpu, *args, **(kwargs or {}))
        for each in result if isinstance(result, list | tuple) else [result]:
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return result
