"""Probe for calls to CUDA in `import megatron.core`.

Constants of `megatron.core.ssm.ops.gdp.common` on main hold the name and the capability of device 0 (#6538); since #6595 an import of `megatron.core` alone
evaluates them, by way of the inference contexts. That initialises CUDA in the process.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.definitions import words
from megacpp_overlays.source.findings import absent, at, broken, unknown
from megacpp_overlays.source.trees import FunctionNode, SourceTree

_PACKAGE = "megatron.core.ssm.ops.gdp"
TARGET = Target(distribution="megatron-core", module=f"{_PACKAGE}.common", symbol="IS_NVIDIA_HOPPER")
WITH_THE_PACKAGE = "asked-with-the-package"
WITH_HYBRID_MODELS = "asked-with-hybrid-models"

_REACHED_FROM = "megatron.core.inference.contexts.dynamic_context"
"""Module that `import megatron.core` executes on main, and that has imported the kernels since #6595."""
_HARMLESS = {"is_available", "is_initialized"}
"""Functions of `torch.cuda` that do not initialise CUDA."""


def probe(tree: SourceTree) -> Finding:
    """Return whether the import asks, and how much has to be imported for that."""
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no {TARGET.module}")
    asking = next(_asking(source.syntax.body), None)
    if asking is None:
        raise unknown(source, None, "nothing is seen to ask for the device when it is imported")
    if "is_initialized" in words(source.syntax):
        raise unknown(source, asking, "it may only be asked where CUDA is initialised already")
    seen = at(source, asking, f"{ast.unparse(asking.func)} is called by the import")
    context = tree.module(_REACHED_FROM)
    for node in context.syntax.body if context else ():
        if context and isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PACKAGE):
            return broken(WITH_THE_PACKAGE, seen, at(context, node, "imported with megatron.core"))
    return broken(WITH_HYBRID_MODELS, seen)


def _asking(body: Sequence[ast.stmt]) -> Iterator[ast.Call]:
    """Yield the questions about a device that are asked when a module is executed.

    A function asks when it is called: by a statement of the module, or by a function that one calls.
    """
    functions = {node.name: node for node in body if isinstance(node, FunctionNode)}
    imported = {
        alias.asname or alias.name
        for node in body
        if isinstance(node, ast.ImportFrom) and node.module == "torch.cuda"
        for alias in node.names
        if alias.name not in _HARMLESS
    }
    waiting = [node for node in body if not isinstance(node, FunctionNode)]
    waiting += [each for node in functions.values() for each in _executed_with(node)]
    called: set[str] = set()
    while waiting:
        for call in _calls_at_once(waiting.pop()):
            name = call.func.id if isinstance(call.func, ast.Name) else None
            if name in imported or _asks_cuda(call.func):
                yield call
            elif name in functions and name not in called:
                called.add(name)
                waiting += functions[name].body


def _asks_cuda(function: ast.expr) -> bool:
    if not isinstance(function, ast.Attribute) or function.attr in _HARMLESS:
        return False
    return ast.unparse(function.value) in {"torch.cuda", "cuda"}


def _executed_with(function: FunctionNode) -> list[ast.stmt]:
    """Return the expressions that a definition executes: its decorators and the defaults of its arguments."""
    found = [*function.decorator_list, *function.args.defaults, *filter(None, function.args.kw_defaults)]
    return [ast.Expr(value=each) for each in found]


def _calls_at_once(node: ast.AST) -> Iterator[ast.Call]:
    if isinstance(node, FunctionNode | ast.Lambda):
        return
    if isinstance(node, ast.Call):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _calls_at_once(child)
