"""Comparison of a repair in the source with the loaded code: the code that runs must be the code in the file.

A file can be replaced after it was loaded, a stale `.pyc` can be executed in its place, and other code can replace the repaired
function or class. So each definition that a repair goes through is compiled again from the text that was read, which takes a
fraction of a millisecond, and compared with the object that the live name is bound to. The defaults of its parameters belong to
the function and not to its code, and are compared, too. A module that is not loaded yet cannot differ and is skipped.
"""

from __future__ import annotations
import __future__

import ast
import functools
import sys
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

from megacpp_overlays.errors import SeamError
from megacpp_overlays.loader.import_hooks import is_half_imported
from megacpp_overlays.loader.live_names import namespace, owner_name, resolve
from megacpp_overlays.loader.ownership import layers, same_file
from megacpp_overlays.loader.seams import describe
from megacpp_overlays.model import Body, Erratum, Finding, Overlay
from megacpp_overlays.runtime import seam_marks
from megacpp_overlays.source.readings import wrappers
from megacpp_overlays.source.trees import FunctionNode, ModuleSource, SourceTree

_COMPARED = (
    "co_name",
    "co_argcount",
    "co_posonlyargcount",
    "co_kwonlyargcount",
    "co_flags",
    "co_code",
    "co_names",
    "co_varnames",
    "co_freevars",
    "co_cellvars",
    "co_firstlineno",
)
"""Attributes that equal code objects share. Column positions, which `-X no_debug_ranges` leaves out, are not compared."""


def difference(finding: Finding, tree: SourceTree, target: ModuleType | None = None) -> str | None:
    """Return a sentence on the first body of a repair whose loaded code differs from the source, or None if all agree.

    Args:
        finding: the finding that names the bodies.
        tree: the source tree where they were read.
        target: a module to treat as complete: the hooks call this before the import system clears `_initializing` in its spec.
    """
    for body in finding.repair:
        module = sys.modules.get(body.module) if isinstance(body, Body) else None
        if isinstance(body, Body) and module is not None:
            complete = module is target or not is_half_imported(module)
            if (found := _difference(body, module, tree, complete=complete)) is not None:
                return found
    return None


def misbehaviour(erratum: Erratum, module: ModuleType) -> str | None:
    """Return a sentence if the witness of an overlay sees the defect in a target that was read as repaired, or None."""
    if isinstance(erratum, Overlay) and erratum.witness is not None and (seen := erratum.witness(module)).broken:
        return f"the probe says FIXED but the loaded code does not behave so: {seen.seen}"
    return None


def _difference(body: Body, module: ModuleType, tree: SourceTree, *, complete: bool) -> str | None:
    source = tree.module(body.module)
    if source is None:
        return f"{body.module} is loaded and has no source"
    for symbol in [body.symbol] if body.symbol else _definitions(source.syntax.body):
        if not complete and symbol.partition(".")[0] not in namespace(module):
            continue  # the module imports the target, and has not executed this line yet
        if (live := _other_than_read(module, symbol, source)) is not None:
            return live
    return None


def _definitions(body: list[ast.stmt]) -> Iterator[str]:
    return (node.name for node in body if isinstance(node, ast.ClassDef | FunctionNode))


def _other_than_read(module: ModuleType, symbol: str, source: ModuleSource) -> str | None:
    nodes = _defined(source.syntax.body, symbol)
    if not nodes:
        return _another_import(module, symbol, source)
    if isinstance(cls := nodes[-1], ast.ClassDef):
        return _another_class(module, symbol, cls, source)
    raw = _attribute(module, symbol)
    if (mark := seam_marks.mark_of(raw)) is not None:
        raw = mark.original
    for node in nodes:
        if isinstance(node, FunctionNode) and (function := _as_read(raw, symbol, node, source)) is not None:
            if _has_defaults(function, node.args):
                return None
            return (
                f"{source.name}.{symbol} as it is loaded has other defaults than the text read in {_at(source, node)}"
            )
    state = "is not there" if raw is None else f"is {describe(raw)}"
    return f"{source.name}.{symbol} as it is loaded {state}, which is not the code that was read in {_at(source, cls)}"


def _defined(body: Sequence[ast.AST], symbol: str) -> list[ast.ClassDef | FunctionNode]:
    """Return the definitions of a name; a property with a setter has several. The probe has checked other bindings of the name."""
    name, _, rest = symbol.partition(".")
    found: list[ast.ClassDef | FunctionNode] = []
    for node in body:
        if isinstance(node, ast.ClassDef | FunctionNode):
            if node.name == name:
                found += _defined(node.body, rest) if rest else [node]
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            found += _defined([*ast.iter_child_nodes(node)], symbol)
    return found


def _as_read(raw: Any, symbol: str, node: FunctionNode, source: ModuleSource) -> FunctionType | None:
    """Return the live function with the code of a definition, below at most as many wrappers as it has decorators, or None."""
    read = _compiled(symbol, node, source)
    for live in layers(raw, wrappers(node)):
        # By type: a third-party proxy returns the code of the function that it wraps.
        if type(live) is FunctionType and read is not None and _alike(live.__code__, read):
            return live if same_file(live.__code__.co_filename, source.path) else None
    return None


def _has_defaults(function: FunctionType, arguments: ast.arguments) -> bool:
    """Return whether a function has the defaults of its source, as far as these are literals."""
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    by_name = {each.arg: value for each, value in named if value is not None}
    live, live_by_name = function.__defaults__ or (), function.__kwdefaults__ or {}
    return (
        len(live) == len(arguments.defaults)
        and all(map(_is_default, live, arguments.defaults))
        and live_by_name.keys() == by_name.keys()
        and all(_is_default(live_by_name[name], value) for name, value in by_name.items())
    )


def _is_default(live: object, read: ast.expr) -> bool:
    """Return whether a live value may be the value of a default: a literal must be equal, any other expression may have any value."""
    try:
        literal = ast.literal_eval(read)
    except (ValueError, TypeError):  # a name, a call, an operator; or a set of lists
        return True
    if isinstance(literal, list | dict | set):
        return type(live) is type(literal)  # the code itself may have written to it since
    return _same(live, literal)


def _another_class(module: ModuleType, symbol: str, node: ast.ClassDef, source: ModuleSource) -> str | None:
    live = _attribute(module, symbol)
    if not isinstance(live, type) or (live.__module__, live.__qualname__) != (source.name, symbol):
        other = owner_name(live) if isinstance(live, type) else repr(live)
        return f"{source.name}.{symbol} as it is loaded is {other}, which is not the class that was read in {_at(source, node)}"
    names = dict.fromkeys(_definitions(node.body))
    inside = (_other_than_read(module, f"{symbol}.{name}", source) for name in names)
    return next(filter(None, inside), None)


def _attribute(module: ModuleType, symbol: str) -> Any:
    """Return the attribute of a symbol in the own namespace of its class or module, or None if it is missing or inherited."""
    try:
        return resolve(module, symbol).own
    except SeamError:
        return None


def _another_import(module: ModuleType, symbol: str, source: ModuleSource) -> str | None:
    """Return a sentence if a name that the source imports from another module is bound to a different object than there, or None."""
    for statement in source.syntax.body:
        if not isinstance(statement, ast.ImportFrom):
            continue
        for alias in statement.names:
            if (alias.asname or alias.name) == symbol:
                origin = _origin(module, statement)
                there = sys.modules.get(origin)
                live = namespace(module).get(symbol)
                if there is None or (given := namespace(there).get(alias.name)) is live or _ours(given, live):
                    return None
                return (
                    f"{source.name}.{symbol} as it is loaded is {describe(live)}, "
                    f"which is not the one of {origin} that was read"
                )
    return f"{symbol} is not defined in {source.path}, where it was read"


def _ours(given: Any, live: Any) -> bool:
    """Return whether one of two objects is a seam of this package over the other, so that neither is third-party code."""
    marks = [mark.original for each in (given, live) if (mark := seam_marks.mark_of(each)) is not None]
    return any(original in (given, live) for original in marks)


def _origin(module: ModuleType, statement: ast.ImportFrom) -> str:
    package = module.__name__ if hasattr(module, "__path__") else module.__name__.rpartition(".")[0]
    parents = package.split(".")[: len(package.split(".")) - (statement.level - 1)] if statement.level else []
    return ".".join([*parents, *([statement.module] if statement.module else [])])


def _compiled(symbol: str, node: FunctionNode, source: ModuleSource) -> CodeType | None:
    """Return the code of a function or method, compiled from the text that was read; it is never executed."""
    statement: ast.stmt = node
    owner, _, _ = symbol.rpartition(".")
    while owner:  # a method is compiled inside its class, for `super()` and for names with two underscores
        (*_, cls) = _defined(source.syntax.body, owner)
        copied = ast.ClassDef(**{**dict(ast.iter_fields(cls)), "bases": [], "keywords": [], "decorator_list": []})
        copied.body = [statement]
        statement = ast.copy_location(copied, cls)
        owner = owner.rpartition(".")[0]
    code: CodeType = compile(
        ast.Module([*_imports(source.syntax.body), statement], []),
        source.path,
        "exec",
        flags=_future_flags(source.syntax),
        dont_inherit=True,
    )
    for name in symbol.split("."):
        found = [each for each in _inner(code) if each.co_name == name]
        if len(found) != 1:
            return None
        code = found[0]
    return code


def _imports(body: Sequence[ast.AST]) -> Iterator[ast.stmt]:
    """Yield the imports of a module, because the compiler emits other code for attribute calls on an imported name."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            if getattr(node, "module", None) != "__future__":  # must come first; passed as flags instead
                yield node
        elif not isinstance(node, ast.ClassDef | FunctionNode | ast.expr):
            yield from _imports([*ast.iter_child_nodes(node)])


def _future_flags(syntax: ast.Module) -> int:
    names = [
        alias.name
        for node in syntax.body
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        for alias in node.names
    ]
    return functools.reduce(lambda flags, name: flags | getattr(__future__, name).compiler_flag, names, 0)


def _inner(code: CodeType) -> Iterator[CodeType]:
    """Yield the code objects that are defined in this scope, also those inside a scope of type parameters."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            if each.co_name.startswith("<generic parameters of"):
                yield from _inner(each)


def _alike(one: CodeType, other: CodeType) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in _COMPARED) and _same(
        one.co_consts, other.co_consts
    )


def _same(one: object, other: object) -> bool:
    """Return whether two constants are the same: 0 is not False, and 0.0 is not -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, CodeType) and isinstance(other, CodeType):
        return _alike(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, frozenset) and isinstance(other, frozenset):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    return repr(one) == repr(other)


def _at(source: ModuleSource, node: ast.AST) -> str:
    return f"{source.path}:{getattr(node, 'lineno', 0)}"
