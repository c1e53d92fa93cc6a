"""The DSA indexer of an upstream tree as a module of plain functions, and cases for it, shared by its tests."""

from __future__ import annotations

import ast
import functools
import inspect
import marshal
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from dsa_source import compiled, install, module_of
from torch.utils._python_dispatch import TorchDispatchMode

from megacpp_overlays.feature_probes import dsa_indexer_streaming as feature
from megacpp_overlays.overlays.dsa_indexer_streaming import OVERLAY
from megacpp_overlays.source.file_trees import DirectoryTree
from megacpp_overlays.source.trees import SourceTree

_VARIANT = feature.TARGET.module.rpartition(".")[0]
_KEPT = {"FusedDSAIndexerLoss", "_FUSED_DSA_INDEXER_LOSS_INPUT_NAMES", "INDEXER_LOSS_EPS"}
_METHOD = "DSAIndexer"

WITHOUT_LOSS = {
    feature.SOFTENED_LOSS: feature.FOUR_AXIS,
    feature.EXACT_LOSS: feature.FOUR_AXIS_OPTIONAL_RELU,
    feature.EXACT_LOSS_EXTERNAL_MASS: feature.FOUR_AXIS_OPTIONAL_RELU,
}
"""The shape of scores and backward alone, by that with the loss."""
ALONE = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
"""Process groups of one rank."""


def indexer_of(tree: Path | SourceTree) -> ModuleType:
    """Return the scores, the loss and its autograd function of a tree, executed without the modules that they import.

    Of the class that 0.16 has, only the method that computes the scores is there.
    """
    tree = DirectoryTree(tree) if isinstance(tree, Path) else tree
    module = _with_the_rest(tree, feature.TARGET.module)
    for name in ("dsa_masking", "dsa_layout", "dsa_indexer_loss"):
        if tree.module(f"{_VARIANT}.{name}") is not None:
            vars(module)[name] = _with_the_rest(tree, f"{_VARIANT}.{name}")
    return module


def _with_the_rest(tree: SourceTree, name: str) -> ModuleType:
    module, source = module_of(tree, name), tree.module(name)
    assert source is not None
    for code in _the_rest(source.text, source.path):
        exec(marshal.loads(code), vars(module))
    return module


@functools.cache
def _the_rest(text: str, path: str) -> list[bytes]:
    """Return code for the definitions of a module that are no functions and that these tests use."""
    found = []
    for node in ast.parse(text).body:
        names = {getattr(node, "name", None)}
        names |= {target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef) and node.name == _METHOD:
            node.body = [each for each in node.body if getattr(each, "name", None) == feature.SCORES]
            node.bases = []
            names &= {_METHOD if node.body else None}
        else:
            names &= _KEPT
        if names:
            found.append(compiled(ast.unparse(node), path))
    return found


@functools.cache
def shape_of(tree: SourceTree) -> str:
    """Return the broken shape of a tree."""
    shape = feature.probe(tree).shape
    assert shape is not None
    return shape


def installed(tree: SourceTree, module: ModuleType) -> Any:
    """Put the seams into a module; return a function that removes them."""
    return install(OVERLAY, shape_of(tree), module)


def scores_of(module: ModuleType) -> Any:
    """Return the function, or the method without its object, that computes index scores now."""
    if hasattr(module, feature.SCORES):
        return getattr(module, feature.SCORES)
    return lambda *given: vars(module.DSAIndexer)[feature.SCORES](None, *given)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Return normal numbers that depend on nothing but a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs_of(
    queries: int,
    keys: int,
    batch: int = 2,
    heads: int = 4,
    dim: int = 8,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[Any]:
    """Return q, weights and k as leaves that want gradients."""
    shapes = ((queries, batch, heads, dim), (queries, batch, heads), (keys, batch, dim))
    return [numbers(*shape, seed=seed + place, dtype=dtype).requires_grad_() for place, shape in enumerate(shapes)]


def causal(queries: int, keys: int) -> Any:
    """Return the additive mask that lets a query see the keys up to its own place."""
    return torch.full((queries, keys), float("-inf")).triu(keys - queries + 1)


def trained(module: ModuleType, inputs: list[Any], pg_collection: Any = ALONE, **loss: Any) -> tuple[Any, list[Any]]:
    """Train with the fused loss once; return loss and gradients.

    Args:
        module: the module that `indexer_of` returned, or the real one.
        inputs: q, weights and k.
        pg_collection: the process groups.
        loss: arguments of that version's autograd function, by name; the rest has defaults of this function.
    """
    q, _, k = inputs
    (queries, batch), keys = q.shape[:2], k.size(0)
    given = {
        "query": numbers(queries, batch, 3, 5, seed=7),
        "key": numbers(keys, batch, 3, 5, seed=8),
        "softmax_scale": 0.4,
        "topk": min(3, keys),
        "loss_coeff": 0.1,
        "mask": causal(queries, keys),
        "sparse_loss": False,
        "pg_collection": pg_collection,
        **loss,
    }
    parameters = [*inspect.signature(module.FusedDSAIndexerLoss.forward).parameters.values()][4:]
    taken = {p.name for p in parameters}
    assert set(given) <= taken, set(given) - taken
    arguments = [given.get(p.name, p.default) for p in parameters]
    _, result = module.FusedDSAIndexerLoss.apply(*inputs, *arguments)
    return result.detach(), list(torch.autograd.grad(result, inputs, torch.tensor(2.0)))


class Largest(TorchDispatchMode):
    """Note the most elements that an operator returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, list | tuple) else [result]:
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return result


def supported(module: ModuleType, **loss: Any) -> dict[str, Any]:
    """Return the arguments that the loss of this version takes."""
    return {
        name: value
        for name, value in loss.items()
        if name in inspect.signature(module.FusedDSAIndexerLoss.forward).parameters
    }


LOSSES: dict[str, dict[str, Any]] = {
    "dense": {},
    "sparse": {"sparse_loss": True},
    "three-axis mask": {"mask": causal(7, 9).expand(2, 7, 9)},
    "packed": {
        "mask": None,
        "varlen_starts": torch.tensor([0, 0, 0, 3, 3, 3, 3]),
        "varlen_ends": torch.tensor([1, 2, 3, 4, 5, 6, 9]),
    },
    "other key positions": {
        "mask": None,
        "varlen_starts": torch.zeros(7, dtype=torch.int64),
        "varlen_ends": torch.arange(1, 8),
        "key_positions": torch.arange(9).flip(0),
    },
    "padded rows": {"query_valid_rows": torch.tensor([True] * 5 + [False] * 2)},
    "per token": {"calculate_per_token_loss": True},
    "per token, sparse": {"calculate_per_token_loss": True, "sparse_loss": True},
    "denominator of its own": {"non_compressed_lse": numbers(2, 3, 7, seed=9)},
    "mask of its own": {"causal_mask_override": causal(7, 9).expand(2, 7, 9), "mask": causal(7, 9)},
}
