"""Tell whether code is, statement for statement, code that was read before.

A structural reason says why code is broken; it does not say that nothing else in it changed. A probe whose seam relies
on the rest compares fingerprints as well, so that any edit of meaning ends in UNRECOGNISED. Comments, docstrings,
layout and whatever differs between Python versions do not count.
"""

from __future__ import annotations

import ast

from megacpp_overlays.source import knowledge
from megacpp_overlays.source.trees import FunctionNode

_SKIPPED = {"ctx", "kind", "type_comment"}


def fingerprint(node: object) -> str:
    """Return 16 hexadecimal digits for the meaning-bearing syntax of a node, a list of nodes, or None."""
    import hashlib  # noqa: PLC0415 - not needed to arm

    return knowledge.as_known(hashlib.sha256(repr(_plain(node)).encode()).hexdigest()[:16])


def _plain(node: object) -> object:
    if isinstance(node, list):
        return tuple(_plain(item) for item in node)
    if not isinstance(node, ast.AST):
        return repr(node)
    fields: list[tuple[str, object]] = []
    for name, value in ast.iter_fields(node):
        # A newer Python adds fields, and leaves them empty for code that older ones can read.
        if value is None or value == [] or name in _SKIPPED:
            continue
        if name == "body" and isinstance(node, ast.ClassDef | FunctionNode) and is_docstring(value[0]):
            value = value[1:]  # the same body, without its text
        fields.append((name, _plain(value)))
    return (type(node).__name__, *fields)


def is_docstring(node: ast.stmt) -> bool:
    """Return whether a statement is nothing but text."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
