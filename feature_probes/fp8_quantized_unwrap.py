"""Does the dispatcher of the fused SparseMLA kernel know a quantized query or key when it gets one?

A quantized tensor of Transformer Engine says bf16 and has no storage. What was seen of the dispatcher:

    per-batch-pointer   `query[:, i].contiguous()` for each batch element, and that goes to the kernel. Slices of a
                        Float8Tensor stay what they are, so the kernel gets pointer 0. Source builds of spring 2026 in
                        `dsa.py`, early revisions of pull request 5049 in `ops/tilelang_dsa.py`
    bf16-guard-fooled   a guard asks for bf16 and is told so; the permutation that follows dequantizes silently.
                        0.19.0, 0.19.2, main since 2026-07-24, and the port to dev in pull request 6279
    ABSENT              0.18.2 and older, dev, and the head of pull request 3674, whose backends are elsewhere
    FIXED               nothing yet: the dispatcher would have to ask for QuantizedTensor and dequantize, or decline,
                        and be a known one otherwise

The seam hands the dispatcher plain tensors, so it fits any dispatcher that does not look for quantized ones. Every
call and attribute in it must be one that was read, and nothing in it, in its guard or in the kernel's autograd function
may be named after quantization. Kernel and guard must be bound where they were, and nowhere else.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Sequence

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes.findings import conclusion
from megacpp_overlays.model import Evidence, Finding, Target, Verdict
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
_QUANTIZED = "QuantizedTensor"
_GUARD = "_all_bfloat16"
_GUARD_SAYS = "return all((tensor.dtype == torch.bfloat16 for tensor in tensors))"
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
_ABOUT_QUANTIZATION = re.compile(r"quant|float8|fp8|mxfp|nvfp|scale_inv|_data\b|__torch_", re.IGNORECASE)


class _UnknownError(Exception):
    """Something that no known form has."""

    def __init__(self, seen: str, node: ast.AST) -> None:
        super().__init__(seen)
        self.line: int | None = getattr(node, "lineno", None)


def probe(tree: SourceTree) -> Finding:
    """Return what `ops.tilelang_dsa.fused_sparse_mla_absorbed` does to a quantized query or key.

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
        return conclusion(Verdict.ABSENT, None, Evidence(seen=f"there is no module {target.module}"))
    if not re.search(rf"\b{target.symbol}\b", source.text):
        return conclusion(Verdict.ABSENT, None, Evidence(seen=f"defines no {target.symbol}", file=source.path))
    try:
        function = _the_function(source, target.symbol)
        rest = _without_repair(source, function)
        _check_known(source, rest or function)
        _check_kernel(tree)
        finding = _shape(source, rest or function)
    except _UnknownError as unknown:
        return conclusion(Verdict.UNRECOGNISED, None, _at(source, str(unknown), unknown.line))
    except SourceError as error:
        return conclusion(Verdict.UNRECOGNISED, None, Evidence(seen=str(error)))
    if rest is not None:
        return conclusion(Verdict.FIXED, None, _at(source, "asks for QuantizedTensor itself", function.lineno))
    return finding


def _the_function(source: ModuleSource, symbol: str) -> FunctionNode:
    function = source.function(symbol)
    if function is None or function not in source.syntax.body or function.decorator_list:
        raise _UnknownError(f"{symbol} is no plain function of this module", function or source.syntax)
    for node in ast.walk(source.syntax):
        if isinstance(node, ast.Name) and node.id == symbol and not isinstance(node.ctx, ast.Load):
            raise _UnknownError(f"{symbol} is bound again", node)
    if (names := parameters(function)) != _PARAMETERS:
        raise _UnknownError(f"{symbol} takes other parameters than any known one: {', '.join(names)}", function)
    return function


def _check_known(source: ModuleSource, function: FunctionNode) -> None:
    """Raise unless every call and attribute was read before and nothing is named after quantization."""
    for node in ast.walk(function):
        if (name := _identifier(node)) is not None and _ABOUT_QUANTIZATION.search(name):
            raise _UnknownError(f"{function.name} knows of {name}, in a way that is not known", node)
        if isinstance(node, ast.Call) and not _is_known_call(node):
            raise _UnknownError(f"{function.name} calls {ast.unparse(node.func)}", node)
    for node in (node for statement in function.body for node in ast.walk(statement)):
        if isinstance(node, ast.Attribute) and node.attr not in _ATTRIBUTES:
            raise _UnknownError(f"{function.name} looks at {ast.unparse(node)}", node)
    start = _statements(function)[0]
    if ast.unparse(start) != f"if {KERNEL} is None:\n    return None":
        raise _UnknownError(f"{function.name} does not begin by declining where there is no kernel", start)
    imports = [node for node in ast.walk(source.syntax) if isinstance(node, ast.ImportFrom) and _brings_kernel(node)]
    if [node.module for node in imports] != [KERNEL_MODULE]:
        raise _UnknownError(f"{KERNEL} is not the one of {KERNEL_MODULE}", imports[0] if imports else source.syntax)
    _check_bound(source, KERNEL, _kernel_bindings(source, imports[0]))
    guard = source.function(_GUARD)
    is_plain = guard is not None and guard in source.syntax.body and not guard.decorator_list
    _check_bound(source, _GUARD, [guard] if guard is not None and is_plain else [])


def _kernel_bindings(source: ModuleSource, brought: ast.ImportFrom) -> list[ast.AST]:
    """Return what may bind the kernel: its import, and `= None` where that import fails."""
    if brought in source.syntax.body:
        return list(brought.names)
    for statement in source.syntax.body:
        if isinstance(statement, ast.Try) and brought in statement.body:
            fallbacks = [node for handler in statement.handlers for node in handler.body]
            targets = [
                node.targets[0]
                for node in fallbacks
                if isinstance(node, ast.Assign) and ast.unparse(node) == f"{KERNEL} = None"
            ]
            return [*brought.names, *targets]
    return []


def _check_bound(source: ModuleSource, name: str, allowed: Sequence[ast.AST]) -> None:
    for node in ast.walk(source.syntax):
        if _binds(node, name) and not any(node is each for each in allowed):
            raise _UnknownError(f"{name} is bound in another way than any known one", node)


def _binds(node: ast.AST, name: str) -> bool:
    """Return whether a node binds or deletes a name, changes what it names, or could: a star, or the name as text."""
    match node:
        case ast.Name(id=used) | ast.Attribute(value=ast.Name(id=used)):
            return used == name and not isinstance(node.ctx, ast.Load)
        case ast.FunctionDef(name=used) | ast.AsyncFunctionDef(name=used) | ast.ClassDef(name=used):
            return used == name
        case ast.ExceptHandler(name=used) | ast.MatchAs(name=used) | ast.MatchStar(name=used) | ast.arg(arg=used):
            return used == name
        case ast.MatchMapping(rest=used):
            return used == name
        case ast.alias(name=used, asname=given):
            return (given or used.split(".")[0]) in {name, "*"}
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            return name in names
        case ast.Constant(value=value):
            return bool(value == name)
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[ast.Name(id=used), *_]):
            return used == name
        case _:
            return False


def _brings_kernel(node: ast.ImportFrom) -> bool:
    return any(KERNEL in {alias.name, alias.asname} for alias in node.names)


def _is_known_call(call: ast.Call) -> bool:
    if ast.unparse(call.func) in _FUNCTIONS:
        return True
    return isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS


def _check_kernel(tree: SourceTree) -> None:
    """Raise if the kernel's autograd function, where there is one, looks for quantized tensors itself."""
    source = tree.module(KERNEL_MODULE)
    if source is None:
        return
    for node in ast.walk(source.syntax):
        if (name := _identifier(node)) is not None and _ABOUT_QUANTIZATION.search(name):
            raise SourceError(f"{source.path}: {KERNEL} knows of {name}, in a way that is not known")


def _identifier(node: ast.AST) -> str | None:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.arg(arg=name):
            return name
        case ast.keyword(arg=name):
            return name
        case _:
            return None


def _shape(source: ModuleSource, function: FunctionNode) -> Finding:
    calls = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"{KERNEL}.apply"
    ]
    if len(calls) != 1 or calls[0].keywords or len(calls[0].args) != 4:
        raise _UnknownError(f"{function.name} does not call {KERNEL}.apply once with four arguments", function)
    call = calls[0]
    forms = {_form(function, argument, name) for argument, name in zip(call.args, TENSORS, strict=False)}
    match forms.pop() if len(forms) == 1 else None:
        case "slice":
            seen = "the kernel gets query[:, i].contiguous(), which stays quantized and has pointer 0"
            return conclusion(Verdict.BROKEN, PER_BATCH, _at(source, seen, call.lineno))
        case "permutation" if _is_guarded(source, function):
            seen = f"{_GUARD} takes a quantized tensor for bf16, and permute dequantizes it silently"
            return conclusion(Verdict.BROKEN, GUARD_FOOLED, _at(source, seen, call.lineno))
        case _:
            raise _UnknownError(f"what {KERNEL}.apply gets is made in no known way", call)


def _form(function: FunctionNode, argument: ast.expr, tensor: str) -> str | None:
    """Return how an argument of the kernel is first made from a parameter: by a slice or by a permutation."""
    if not isinstance(argument, ast.Name):
        return None
    made = [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [argument.id]
    ]
    match sorted(made, key=lambda value: value.lineno)[:1]:
        case [
            ast.Call(
                func=ast.Attribute(
                    value=ast.Subscript(
                        value=ast.Name(id=name), slice=ast.Tuple(elts=[ast.Slice(None, None, None), ast.Name()])
                    ),
                    attr="contiguous",
                ),
                args=[],
            )
        ] if name == tensor:
            return "slice"
        case [
            ast.Call(
                func=ast.Attribute(
                    value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="permute")), attr="contiguous"
                ),
                args=[],
            )
        ] if name == tensor:
            return "permutation"
        case _:
            return None


def _is_guarded(source: ModuleSource, function: FunctionNode) -> bool:
    """Return whether the dispatcher declines what is not bf16, and asks no more than that."""
    asks = f"if not {_GUARD}({', '.join(TENSORS)}):\n    return None"
    guard = source.function(_GUARD)
    says = [ast.unparse(node) for node in _statements(guard)] if guard else []
    return any(ast.unparse(node) == asks for node in function.body) and says == [_GUARD_SAYS]


def _without_repair(source: ModuleSource, function: FunctionNode) -> FunctionNode | None:
    """Return the function without the first-level statements that ask `isinstance(..., QuantizedTensor)`, for query
    and key, and decline or dequantize; or None if it has no such repair.

    Only refusals may come before them, and only padding may bind the query or the key again.
    """
    imports = [
        node
        for node in source.syntax.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformer_engine"
    ]
    brought = [alias for node in imports for alias in node.names if _binds(alias, _QUANTIZED)]
    if [(alias.name, alias.asname) for alias in brought] != [(_QUANTIZED, None)]:
        return None
    handled: set[str] = set()
    kept: list[ast.stmt] = []
    early = True
    for statement in function.body:
        if names := set(_handled_by(statement)) if early else set():
            handled |= names
        else:
            kept.append(statement)
            early = early and (_is_text(statement) or _declines(statement))
    if handled != set(TENSORS):
        return None
    _check_bound(source, _QUANTIZED, brought)
    rest = copy.copy(function)
    rest.body = kept
    pads = [node.targets[0] for node in ast.walk(rest) if isinstance(node, ast.Assign) and _is_padding(node)]
    for node in (node for statement in kept for node in ast.walk(statement)):
        if any(_binds(node, name) for name in TENSORS) and not any(node is each for each in pads):
            raise _UnknownError(f"{function.name} binds the query or the key again", node)
    return rest


def _is_padding(node: ast.Assign) -> bool:
    value, target = node.value, node.targets[0]
    return (
        isinstance(value, ast.Call)
        and ast.unparse(value.func) == "torch.nn.functional.pad"
        and [ast.unparse(each) for each in (*node.targets, *value.args[:1])] == [ast.unparse(target)] * 2
    )


def _declines(statement: ast.stmt) -> bool:
    match statement:
        case ast.If(body=[ast.Return(value=None | ast.Constant(value=None))], orelse=[]):
            return True
        case _:
            return False


def _handled_by(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.If(test=test) if _declines(statement):
            parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) else [test]
            asked = [name for part in parts for name in TENSORS if _asks(part, name)]
            yield from asked if len(asked) == len(parts) else ()
        case ast.If(test=test, body=[ast.Assign(targets=[ast.Name(id=name)], value=value)], orelse=[]):
            if _asks(test, name) and _dequantizes(value, name):
                yield name
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.IfExp(test=test, body=value, orelse=ast.Name(id=other))):
            if name == other and _asks(test, name) and _dequantizes(value, name):
                yield name


def _asks(test: ast.expr, name: str) -> bool:
    return name in TENSORS and ast.unparse(test) == f"isinstance({name}, {_QUANTIZED})"


def _dequantizes(value: ast.expr, name: str) -> bool:
    types = ("torch.bfloat16", *(f"{each}.dtype" for each in TENSORS))
    known = {f"{name}.dequantize({given})" for given in ("", *(f"dtype={each}" for each in types))}
    return ast.unparse(value) in known


def _statements(function: FunctionNode) -> list[ast.stmt]:
    return function.body[1:] if _is_text(function.body[0]) else function.body


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _at(source: ModuleSource, seen: str, line: int | None) -> Evidence:
    return Evidence(seen=seen, file=source.path, line=line)
