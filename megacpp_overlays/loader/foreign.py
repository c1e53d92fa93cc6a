"""Compare the definitions that a finding was read from with those of the running process.

A finding describes upstream's source text. Another library, or the launcher, may have replaced a definition that the
finding depends on: the function that a seam wraps, a caller, a helper. The finding does not apply to such a process. So
every reading is resolved when an overlay is installed, in each audit, which ranks compare, and before the first step. A
check compares the file and the line of a code object; it compiles nothing, and does not walk the heap.

A module that is not loaded, or a name that its module lacks, cannot differ. These count as upstream's own: seams of this
package, wrapped or not, because they lead to the original; names that a witness or self-test of this package replaces
while it runs; and None where the module itself assigns it for a missing library.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from types import FunctionType
from typing import Any, NamedTuple

from megacpp_overlays.errors import SourceError
from megacpp_overlays.loader import seams
from megacpp_overlays.loader.import_hooks import is_half_imported
from megacpp_overlays.loader.live_names import NOTHING, attributes, follow, is_class, is_module
from megacpp_overlays.loader.ownership import layers, same_file
from megacpp_overlays.model import Finding, Reading, ReadingKind
from megacpp_overlays.runtime.in_this_thread import upstream_of
from megacpp_overlays.runtime.seam_marks import mark_behind, mark_of, plain_function
from megacpp_overlays.source.trees import InstalledTree, readable


class ForeignDefinition(NamedTuple):
    """A definition that a finding was read from, and whose name is bound to other code in this process."""

    name: str
    """`package.module.Class.method`."""
    described: str
    """The other code, for messages."""
    identity: str
    """The other code; the same text in every process."""

    def __str__(self) -> str:
        return f"{self.name}, which this finding was read from, is {self.described} in this process"


def foreign_definitions(finding: Finding | None, *, but: Iterable[str] = ()) -> list[ForeignDefinition]:
    """Return the definitions of a finding whose names are bound to code that the probe did not read.

    Args:
        finding: of a probe, or None.
        but: qualified names that are checked elsewhere, such as the symbols of seams.
    """
    if finding is None or not finding.read:
        return []
    by_name: dict[tuple[str, str], list[Reading]] = {}
    for reading in finding.read:
        by_name.setdefault((reading.module, reading.symbol), []).append(reading)
    left_out = set(but)
    found = (_foreign(readings) for readings in by_name.values() if str(readings[0]) not in left_out)
    return [each for each in found if each is not None]


def _foreign(readings: list[Reading]) -> ForeignDefinition | None:
    """Return the foreign code that a symbol is bound to, or None if it matches a reading; a property with a setter has several."""
    first = readings[0]
    module: Any = sys.modules.get(first.module)
    if module is None:
        return None
    raw = _attribute(module, first.symbol)
    if raw is NOTHING:
        if attributes(module).get(first.symbol.partition(".")[0], NOTHING) is NOTHING:
            return None  # upstream defines it below `try` or `if`; a call of it raises
        is_complete = is_module(module) and not is_half_imported(module)
        return ForeignDefinition(str(first), "not there", "nothing") if is_complete else None
    if any(_is_as_read(raw, reading, module) for reading in readings) or (raw is None and _is_optional(first)):
        return None
    return ForeignDefinition(str(first), seams.describe(raw), seams.identity(raw))


def _is_optional(reading: Reading) -> bool:
    """Return whether a module itself binds a name to None below `try` or `if`, as for a missing optional library."""
    source = readable(InstalledTree(), reading.module)
    try:
        bound = source.bindings.of(reading.symbol.partition(".")[0]) if source is not None else []
    except SourceError:
        return False
    top = source.syntax.body if source is not None else []
    below = (node for each in top for node in ast.walk(each) if node is not each)
    return any(target is each for node in below for target in _set_to_none(node) for each in bound)


def _set_to_none(node: ast.AST) -> list[ast.expr]:
    """Return the targets of an assignment of None, annotated or not."""
    match node:
        case ast.Assign(value=ast.Constant(value=None)):
            return node.targets
        case ast.AnnAssign(value=ast.Constant(value=None)):
            return [node.target]
    return []


def _attribute(module: Any, symbol: str) -> Any:
    """Return the raw attribute at a dotted name in a module without inherited ones, or the object in place of a class."""
    found = follow(module, symbol)
    return upstream_of(found.own) if found.is_complete else found.own


def _is_as_read(raw: Any, reading: Reading, module: Any) -> bool:
    if reading.kind is ReadingKind.IMPORT:
        return _is_as_imported(raw, reading)
    if reading.kind is ReadingKind.CLASS:
        return _is_class(raw, reading)
    raw = upstream_of(plain_function(raw))
    if (mark := mark_behind(raw)) is not None:
        raw = mark.original
    file = attributes(module).get("__file__")
    for live in layers(raw, reading.wrappers):
        # By type: a third-party proxy returns the code of the function that it wraps.
        if type(live) is FunctionType:
            code = live.__code__
            if code.co_firstlineno == reading.line and isinstance(file, str) and same_file(code.co_filename, file):
                return True
    return False


def _is_class(raw: Any, reading: Reading) -> bool:
    if type(raw).__module__ == "unittest.mock":
        return True  # upstream's own: the base of the class is a mock where an optional library is missing
    return is_class(raw) and (raw.__module__, raw.__qualname__) == (reading.module, reading.symbol)


def _is_as_imported(raw: Any, reading: Reading) -> bool:
    """Return whether an imported name leads to the attribute of its origin, to a seam, or to upstream's own code."""
    origin, _, name = reading.origin.partition(":")
    given = upstream_of(attributes(sys.modules.get(origin)).get(name, NOTHING))
    if given is NOTHING or given is raw or not _is_code(given):
        return True  # not loaded, the same, or a value that its module may rebind
    if mark_of(raw) is not None or mark_of(given) is not None:
        return True
    return _is_defined_below(_common_package(reading.module, origin), raw)


def _common_package(one: str, other: str) -> str:
    shared = [a for a, b in zip(one.split("."), other.split("."), strict=False) if a == b]
    return ".".join(shared)


def _is_defined_below(package: str, value: Any) -> bool:
    """Return whether a function or class is defined in a package: then its origin was replaced after the import."""
    function = plain_function(value)
    # By globals: `functools.wraps` copies `__module__`.
    is_function = type(function) is FunctionType
    where = function.__globals__.get("__name__") if is_function else getattr(function, "__module__", None)
    return bool(package) and isinstance(where, str) and f"{where}.".startswith(f"{package}.")


def _is_code(value: Any) -> bool:
    return type(value) is FunctionType or is_class(value)
