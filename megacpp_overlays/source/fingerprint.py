"""Fingerprints of code: equal where two pieces of code agree statement for statement.

A structural reason says why code is broken; it does not say that nothing else in it changed. A probe whose seam relies
on the rest compares fingerprints as well, so that any edit of meaning ends in UNRECOGNISED. Comments, docstrings,
layout and differences between Python versions do not count.
"""

from __future__ import annotations

import ast
import functools

from megacpp_overlays.source.trees import FunctionNode

_SKIPPED = {"ctx", "kind", "type_comment"}


def fingerprint(node: object) -> str:
    """Return 16 hexadecimal digits for the meaning-bearing syntax of a node, a list of nodes, or None."""
    return digest(node)[:16]


def digest(node: object) -> str:
    """Return all 64 hexadecimal digits, for code that is not upstream's: no table of fingerprints has it."""
    import hashlib  # noqa: PLC0415 - not needed to arm

    return hashlib.sha256(_text(node).encode()).hexdigest()


def _text(node: object) -> str:
    """Return a node as text: its type and its fields, in the form of `repr` for tuples, and as in older versions of this package."""
    if isinstance(node, list):
        return f"({_text(node[0])},)" if len(node) == 1 else f"({', '.join([_text(item) for item in node])})"
    if not isinstance(node, ast.AST):
        return repr(repr(node))
    kind, fields = _form(type(node))  # type: ignore[arg-type] # mypy asks for the hash of an instance
    found = [kind]
    for name, begin, has_docstring in fields:
        value = getattr(node, name, None)
        # A newer Python adds fields, and leaves them empty for code that older ones can read.
        if value is None or value == []:
            continue
        if has_docstring and is_docstring(value[0]):
            value = value[1:]  # the same body, without its text
        found.append(f"{begin}{_text(value)})")
    return f"({', '.join(found)})" if len(found) > 1 else f"({found[0]},)"


@functools.cache
def _form(kind: type[ast.AST]) -> tuple[str, tuple[tuple[str, str, bool], ...]]:
    """Return the name of a type of node, and its fields that count: how each begins in a text, and whether it may have a docstring."""
    with_docstring = issubclass(kind, ast.ClassDef | FunctionNode)
    fields = [name for name in kind._fields if name not in _SKIPPED]
    return repr(kind.__name__), tuple((name, f"({name!r}, ", with_docstring and name == "body") for name in fields)


def is_docstring(node: ast.stmt) -> bool:
    """Return whether a statement is nothing but text."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
