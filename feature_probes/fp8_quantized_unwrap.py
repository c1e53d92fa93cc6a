"""Probe the dispatcher of the fused SparseMLA kernel for its treatment of a quantized query or key.

A quantized tensor of Transformer Engine reports bf16 and has no storage. Source builds of spring 2026, and early revisions of pull request 5049, pass
slices of it to the kernel, which gets pointer 0. Since 0.19.0 a guard checks for bf16 and accepts it, and a permutation dequantizes silently.

The seam passes plain tensors to the dispatcher, so it fits any dispatcher that does not look for quantized ones. Every
call and attribute in it must be one that was read, and nothing in it, in its guard or in the kernel's autograd function
may be named after quantization. Kernel and guard must be bound where they were, and nowhere else.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.definitions import called, plain_function, statements, words
from megacpp_overlays.source.findings import absent, at, broken, unknown
from megacpp_overlays.source.patterns import Pattern
from megacpp_overlays.source.trees import FunctionNode, ModuleSource, SourceTree, parameters

_PACKAGE = "megatron.core.transformer.experimental_attention_variant"
DISTRIBUTION = "megatron-core"
TARGET = Target(distribution=DISTRIBUTION, module=f"{_PACKAGE}.ops.tilelang_dsa", symbol="fused_sparse_mla_absorbed")
SPRING_TARGET = Target(distribution=DISTRIBUTION, module=f"{_PACKAGE}.dsa", symbol="_fused_sparse_mla_absorbed")
KERNEL_MODULE = f"{_PACKAGE}.ops.sparse_mla"
KERNEL = "SparseMLA"
TENSORS = ("query", "key")

PER_BATCH = "per-batch-pointer"
GUARD_FOOLED = "bf16-guard-fooled"

_PARAMETERS = (*TENSORS, "topk_indices", "softmax_scale", "v_channels")
_GUARD = "_all_bfloat16"
_FUNCTIONS = {
    f"{KERNEL}.apply",
    _GUARD,
    "_is_supported_sparse_mla_head_count",
    "max",
    "range",
    "torch.empty",
    "torch.nn.functional.pad",
}
_METHODS = {"contiguous", "copy_", "permute", "size", "to", "unsqueeze"}
_TORCH = {"apply", "empty", "functional", "int32", "nn", "pad"}
_ATTRIBUTES = _METHODS | _TORCH | {"device", "dtype", "ndim", "shape"}
_ABOUT_QUANTIZATION = r"quant|float8|fp8|mxfp|nvfp|scale_inv|_data\b|__torch_"
"""Compiled at its first use: importing this module is part of every start."""

_NO_KERNEL = Pattern(f"if {KERNEL} is None: return None")
_FALLBACK = Pattern(f"{KERNEL} = None")
_CALL = Pattern(f"{KERNEL}.apply($$given)")
_MADE = Pattern("$name = $value")
_SLICE = Pattern("$tensor[:, $index].contiguous()")
_PERMUTATION = Pattern("$tensor.permute($$axes).contiguous()")
_GUARDED = Pattern(f"if not {_GUARD}({', '.join(TENSORS)}): return None")
_GUARD_SAYS = Pattern(f"""
def {_GUARD}(*tensors):
    return all((tensor.dtype == torch.bfloat16 for tensor in tensors))
""")


def probe(tree: SourceTree) -> Finding:
    """Return the treatment of a quantized query or key by `ops.tilelang_dsa.fused_sparse_mla_absorbed`.

    Source: https://github.com/NVIDIA/Megatron-LM/pull/5049
    """
    return _probe(tree, TARGET)


def probe_spring(tree: SourceTree) -> Finding:
    """Return the same for `dsa._fused_sparse_mla_absorbed`, where the dispatcher was before `ops.tilelang_dsa`.

    Source: https://github.com/NVIDIA/Megatron-LM/pull/3674
    """
    return _probe(tree, SPRING_TARGET)


def _probe(tree: SourceTree, target: Target) -> Finding:
    source = tree.module(target.module)
    if source is None:
        return absent(f"there is no module {target.module}")
    if not re.search(rf"\b{target.symbol}\b", source.text) and source.find(target.symbol) is None:
        return absent(f"defines no {target.symbol}", source)
    function = _dispatcher(source, target.symbol)
    _check_known(source, function)
    _check_names(source, function)
    _check_kernel(tree)
    shape, call, seen = _shape(source, function)
    return broken(shape, at(source, call, seen))


def _dispatcher(source: ModuleSource, symbol: str) -> FunctionNode:
    function = plain_function(source, symbol)
    if function is None:
        raise unknown(source, None, f"{symbol} is no plain function of this module")
    if (names := parameters(function)) != _PARAMETERS:
        raise unknown(source, function, f"{symbol} takes other parameters than any known one: {', '.join(names)}")
    return function


def _check_known(source: ModuleSource, function: FunctionNode) -> None:
    """Raise unless every call and attribute was read before and nothing is named after quantization."""
    if word := _about_quantization(function):
        raise unknown(source, function, f"{function.name} knows of {word}, in a way that is not known")
    for node in (node for statement in function.body for node in ast.walk(statement)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) not in _FUNCTIONS and not _is_method(node):
            raise unknown(source, node, f"{function.name} calls {ast.unparse(node.func)}")
        if isinstance(node, ast.Attribute) and node.attr not in _ATTRIBUTES:
            raise unknown(source, node, f"{function.name} looks at {ast.unparse(node)}")
    start = statements(function.body)[0]
    if not _NO_KERNEL.match(start):
        raise unknown(source, start, f"{function.name} does not begin by declining where there is no kernel")


def _is_method(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and called(call) in _METHODS


def _about_quantization(node: ast.AST) -> str | None:
    return next((word for word in sorted(words(node)) if re.search(_ABOUT_QUANTIZATION, word, re.IGNORECASE)), None)


def _check_names(source: ModuleSource, function: FunctionNode) -> None:
    """Raise unless the kernel is the one that is known, the guard a function, and nothing else binds either name."""
    imports = [node for node in ast.walk(source.syntax) if isinstance(node, ast.ImportFrom) and _brings_kernel(node)]
    if [node.module for node in imports] != [KERNEL_MODULE]:
        raise unknown(source, imports[0] if imports else function, f"{KERNEL} is not the one of {KERNEL_MODULE}")
    _check_bound(source, KERNEL, [*_kernel_bindings(source, imports[0])])
    guard = source.bindings.of(_GUARD) and plain_function(source, _GUARD)
    _check_bound(source, _GUARD, [guard] if guard else [])


def _brings_kernel(node: ast.ImportFrom) -> bool:
    return any(KERNEL in {alias.name, alias.asname} for alias in node.names)


def _kernel_bindings(source: ModuleSource, brought: ast.ImportFrom) -> Iterator[ast.AST]:
    """Yield the statements that may bind the kernel: its import, and the assignment of None where that import fails."""
    for statement in source.syntax.body:
        if statement is brought:
            yield from brought.names
        elif isinstance(statement, ast.Try) and brought in statement.body:
            yield from brought.names
            for node in (node for handler in statement.handlers for node in handler.body):
                if isinstance(node, ast.Assign) and _FALLBACK.match(node):
                    yield node.targets[0]


def _check_bound(source: ModuleSource, name: str, allowed: Sequence[ast.AST]) -> None:
    if others := [node for node in source.bindings.anywhere(name) if node not in allowed]:
        raise unknown(source, others[0], f"{name} is bound in another way than any known one")


def _check_kernel(tree: SourceTree) -> None:
    """Raise if the kernel's autograd function, where there is one, looks for quantized tensors itself."""
    source = tree.module(KERNEL_MODULE)
    if source is not None and (word := _about_quantization(source.syntax)):
        raise unknown(source, None, f"{KERNEL} knows of {word}, in a way that is not known")


def _shape(source: ModuleSource, function: FunctionNode) -> tuple[str, ast.AST, str]:
    """Return the shape, the call of the kernel, and a description of its arguments."""
    calls = list(_CALL.find(function))
    given = calls[0].many("given") if len(calls) == 1 else []
    if len(given) != 4 or any(isinstance(each, ast.keyword) for each in given):
        raise unknown(source, function, f"{function.name} does not call {KERNEL}.apply once with four arguments")
    call = calls[0].node
    assert isinstance(call, ast.AST)  # noqa: S101 - a match of an expression
    made = [_first_made(function, argument) for argument in given[: len(TENSORS)]]
    if all(_is_made(value, _SLICE, name) for value, name in zip(made, TENSORS, strict=True)):
        return PER_BATCH, call, "the kernel gets query[:, i].contiguous(), which stays quantized and has pointer 0"
    guarded = any(_GUARDED.match(node) for node in function.body)
    if (
        all(_is_made(value, _PERMUTATION, name) for value, name in zip(made, TENSORS, strict=True))
        and guarded
        and _GUARD_SAYS.match(plain_function(source, _GUARD))
    ):
        return GUARD_FOOLED, call, f"{_GUARD} takes a quantized tensor for bf16, and permute dequantizes it silently"
    raise unknown(source, call, f"what {KERNEL}.apply gets is made in no known way")


def _first_made(function: FunctionNode, argument: ast.AST) -> ast.AST | None:
    """Return the first value of a local name."""
    if not isinstance(argument, ast.Name):
        return None
    made = [found["value"] for found in _MADE.find(function) if found.text("name") == argument.id]
    return min(made, key=lambda value: getattr(value, "lineno", 0), default=None)


def _is_made(value: ast.AST | None, form: Pattern, tensor: str) -> bool:
    found = form.match(value)
    return found is not None and found.text("tensor") == tensor
