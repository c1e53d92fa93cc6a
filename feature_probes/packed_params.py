"""The plain data class in which Megatron's callers say where the documents of a packed row lie."""

from __future__ import annotations

import ast
from collections.abc import Collection

from megacpp_overlays.feature_probes.findings import unknown
from megacpp_overlays.source.trees import FunctionNode, ModuleSource

MODULE = "megatron.core.packed_seq_params"
NAME = "PackedSeqParams"


def data_class(params: ModuleSource, optional: Collection[str], filled: Collection[str] = ()) -> ast.ClassDef:
    """Return the definition of `PackedSeqParams`.

    Args:
        params: the module that holds it.
        optional: fields that are None where a caller does not give them, and stay so.
        filled: fields that a method may fill in then.

    Raises:
        SourceError: it is no plain data class that stands alone, or one of those fields is another.
    """
    cls = params.find(NAME)
    if not isinstance(cls, ast.ClassDef) or cls not in params.syntax.body or len(params.bindings.of(NAME)) != 1:
        raise unknown(params, cls, f"{NAME} is no class that stands alone")
    plain = [ast.unparse(each) for each in cls.decorator_list] == ["dataclass"] and not cls.bases and not cls.keywords
    own = {each.name for each in cls.body if isinstance(each, FunctionNode)}
    if not plain or {name for name in own if name.startswith("__")} - {"__post_init__"}:
        raise unknown(params, cls, f"{NAME} is another kind of class")
    if params.bindings.changes(NAME):
        raise unknown(params, cls, f"{NAME} is changed outside its definition")
    for name in (*optional, *filled):
        values = [
            each.value for each in cls.body if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == name
        ]
        stays = name in filled or len(params.bindings.of(f"{NAME}.{name}")) == 1
        if not stays or [value and ast.unparse(value) for value in values] != ["None"]:
            raise unknown(params, cls, f"{NAME} has another {name}")
    return cls
