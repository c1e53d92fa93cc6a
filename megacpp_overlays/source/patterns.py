"""Syntax patterns: code with holes that matches other code.

    $x     one expression, one statement, or one name (of a function, an attribute, a parameter, an argument)
    $$x    any number of statements, arguments or parameters, none included
    $_     a hole that holds nothing: `$_` and `$$_` may occur often and differ each time

A hole that occurs twice must hold the same code both times. Docstrings, annotations, comments and layout do not count;
everything else does: order, decorators, defaults, the type of a number. A pattern is parsed when it is first used, so
that to import a module of patterns costs nothing.

    _CAST = Pattern("self.add_module('module', $cast)")

    if (found := _CAST.match(statement)) is not None:
        print(found.text("cast"))
"""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from megacpp_overlays.source.fingerprint import is_docstring
from megacpp_overlays.source.trees import FunctionNode

_ONE, _MANY = "_hole_one_", "_hole_many_"
_WITHOUT_MEANING = {"ctx", "kind", "type_comment", "annotation", "returns", "simple"}

_Holes = Mapping[str, object]


class Match:
    """One place where a pattern matches, and the code that its holes hold there."""

    def __init__(self, node: ast.AST, holes: _Holes) -> None:
        self.node = node
        self._holes = holes

    def __getitem__(self, name: str) -> ast.AST:
        """Return the node that `$name` holds; a name is given as an `ast.Name`."""
        held = self._holes[name]
        if not isinstance(held, ast.AST):
            raise KeyError(f"${name} holds any number of things: ask for many({name!r})")
        return held

    def many(self, name: str) -> list[ast.AST]:
        """Return the nodes that `$$name` holds; parameters are given as `ast.arg`."""
        held = self._holes[name]
        if not isinstance(held, list):
            raise KeyError(f"${name} holds one thing")
        return [each[1] if isinstance(each, tuple) else each for each in held]

    def text(self, name: str) -> str:
        """Return the code of the node that `$name` holds."""
        return ast.unparse(self[name])


class Pattern:
    """A piece of code with holes, such as `return $value`: one expression, or statements one after the other."""

    def __init__(self, text: str) -> None:
        self.text = text

    @functools.cached_property
    def _body(self) -> list[ast.stmt]:
        syntax = ast.parse(textwrap.dedent(self.text).replace("$$", _MANY).replace("$", _ONE))
        for node in ast.walk(syntax):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                node.value = node.value.replace(_MANY, "$$").replace(_ONE, "$")  # in text a dollar is a dollar
        return syntax.body

    def match(self, code: ast.AST | Sequence[ast.stmt] | None) -> Match | None:
        """Return the match of a whole expression, statement, module or list of statements, or None."""
        pattern: object = self._body
        compared: object = [code]
        if code is None:
            return None
        match code, self._body:
            case ast.Module(body=statements), _:
                compared = statements
            case ast.expr(), [ast.Expr(value=pattern)]:
                compared = code
            case Sequence(), _:
                compared = [*code]
        holes = next(_matches(pattern, compared, {}), None)
        return None if holes is None else Match(code if isinstance(code, ast.AST) else ast.Module([*code], []), holes)

    def find(self, code: ast.AST) -> Iterator[Match]:
        """Yield the matches of a pattern of one expression or statement in a node and below it, outermost first."""
        kind = ast.expr if isinstance(self._body[0], ast.Expr) else ast.stmt
        found = (self.match(node) for node in ast.walk(code) if isinstance(node, kind))
        return (match for match in found if match is not None)


def _matches(pattern: object, code: object, holes: _Holes) -> Iterator[_Holes]:
    """Yield every way in which code fits a pattern, given the present content of its holes."""
    if (name := _one(pattern, code)) is not None:
        yield from _hold(name, ast.Name(code) if isinstance(code, str) else code, holes)
    elif isinstance(pattern, list | tuple) and isinstance(code, list | tuple):
        if isinstance(pattern, list) and pattern and (name := _many(pattern[0])) is not None:
            for end in range(len(code) + 1):
                for more in _hold(name, code[:end], holes):
                    yield from _matches(pattern[1:], code[end:], more)
        elif pattern and code:
            for more in _matches(pattern[0], code[0], holes):
                yield from _matches(pattern[1:], code[1:], more)
        elif not pattern and not code:
            yield holes
    elif isinstance(pattern, ast.AST) and isinstance(code, ast.AST):
        pattern, code = _unannotated(pattern), _unannotated(code)
        if type(pattern) is type(code):
            yield from _matches((*_fields(pattern),), (*_fields(code),), holes)
    elif repr(pattern) == repr(code):
        yield holes


def _hold(name: str, code: object, holes: _Holes) -> Iterator[_Holes]:
    if name == "_":
        yield holes
    elif name not in holes:
        yield {**holes, name: code}
    elif any(True for _ in _matches(holes[name], code, {})):
        yield holes


def _one(pattern: object, code: object) -> str | None:
    """Return the name of a hole for one thing, if code is a thing of its kind."""
    match pattern, code:
        case (str(text), str()) | (ast.Expr(value=ast.Name(id=text)), ast.stmt()):
            pass
        case (ast.Name(id=text), ast.expr()) if not isinstance(code, ast.Starred):
            pass
        case _:
            return None
    return text.removeprefix(_ONE) if text.startswith(_ONE) else None


def _many(pattern: object) -> str | None:
    """Return the name of a hole for any number of things in a list."""
    match pattern:
        case ast.Name(id=text) | ast.Expr(value=ast.Name(id=text)) | (_, ast.arg(arg=text), _):
            return text.removeprefix(_MANY) if text.startswith(_MANY) else None
    return None


def _unannotated(node: ast.AST) -> ast.AST:
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return ast.Assign(targets=[node.target], value=node.value)
    return node


def _fields(node: ast.AST) -> Iterator[object]:
    """Yield the fields that bear meaning, empty ones as `[]`: the Pythons differ in where they write None."""
    if isinstance(node, ast.arguments):
        yield [*_parameters(node)]
        return
    for name in node._fields:
        value = getattr(node, name, None)
        if name == "body" and isinstance(node, ast.ClassDef | FunctionNode) and value and is_docstring(value[0]):
            value = value[1:]
        elif name == "args" and isinstance(node, ast.Call):
            value = [*node.args, *node.keywords]  # one list, so that `$$x` takes arguments of both kinds
        if name not in _WITHOUT_MEANING and not (name == "keywords" and isinstance(node, ast.Call)):
            yield [] if value is None else value


def _parameters(args: ast.arguments) -> Iterator[tuple[str, ast.arg, ast.expr | None]]:
    """Yield the parameters with their kind and default."""
    plain = [("positional", each) for each in args.posonlyargs] + [("plain", each) for each in args.args]
    required = len(plain) - len(args.defaults)
    for index, (kind, each) in enumerate(plain):
        yield kind, each, None if index < required else args.defaults[index - required]
    if args.vararg:
        yield "*", args.vararg, None
    yield from (("named", each, value) for each, value in zip(args.kwonlyargs, args.kw_defaults, strict=True))
    if args.kwarg:
        yield "**", args.kwarg, None
