"""Name bindings of a module: each syntax node that binds a name, or may bind it to another object.

A probe that has read a definition must know that its name still means this definition when the code runs. So a form that
cannot be followed, such as `exec`, counts as a binding of every name that it could reach. A false binding only keeps an
overlay from being installed. A missed binding would let an overlay replace code that no probe has read.

The analysis follows definitions, assignments of every kind, loops, `with`, `except`, `match`, imports, `del`, `global`,
walruses in comprehensions, `type` statements, attributes that are set on the object of a name, and names in strings:
`setattr`, `globals()`, `vars()`, `__dict__`, `sys.modules`. A definition is itself one of the bindings, and its decorators
are part of its node.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, NamedTuple

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__"}
_RUNNERS = {"exec", "eval"}
_NAMESPACES = {"globals", "locals", "vars"}
_NAMED = {"setattr", "delattr"} | _RUNNERS | _NAMESPACES
"""Built-in functions. A use other than a call by this name, such as an alias, may bind any name."""
_NAMESPACE_ATTRIBUTES = {"__globals__", "f_globals", "f_locals"}
_READERS = {"get", "keys", "values", "items", "copy", "__getitem__", "__contains__"}
_WRITERS = {"update", "setdefault", "pop", "popitem", "clear", "__setitem__", "__delitem__", "__ior__"}
_INNARDS = {"__code__", "__defaults__", "__kwdefaults__", "__class__", "__bases__"}
"""Attributes whose assignment changes the behaviour of a function or a class, while its name means the same object."""
_EVERY_LOOKUP = "__getattribute__"


class _Scope(NamedTuple):
    """Scope of a statement."""

    path: str | None
    """The qualified name of the class, empty for the module; None where names are local, such as in a function."""
    at_import: bool
    """Whether the statement runs when the module is executed."""
    receivers: Mapping[str, tuple[str, _Function]]
    """First parameters of the enclosing methods, by name, each with the class and the method."""


class _Change(NamedTuple):
    """A node that sets or deletes an attribute, or may do so, with the owner of the attribute and the scope."""

    node: ast.AST
    owner: ast.expr | None
    """The expression whose attribute it is; None if it is unknown, as for a name in a string."""
    scope: _Scope
    start: str = ""
    """Constant beginning of a name that is computed when the code runs; empty if there is none."""


class Bindings:
    """Bindings of the names of one module, found in one walk over its syntax."""

    def __init__(self, syntax: ast.Module) -> None:
        self._names: dict[tuple[str | None, str], list[ast.AST]] = defaultdict(list)
        self._attributes: dict[str, list[_Change]] = defaultdict(list)
        self._owners: dict[str, list[ast.AST]] = defaultdict(list)
        self._unnamed: list[_Change] = []
        self._whole_module: list[ast.AST] = []
        self._everything: list[ast.AST] = []
        self._followed: set[int] = set()
        self._finds_modules = False
        self._waiting: list[tuple[ast.AST, _Scope]] = []
        self._push(syntax.body, _Scope("", at_import=True, receivers={}))
        while self._waiting:
            node, scope = self._waiting.pop()
            visit: Callable[..., None] = self._VISITORS.get(type(node), Bindings._visit_below)
            visit(self, node, scope)

    def of(self, symbol: str) -> list[ast.AST]:
        """Return the nodes that bind a name of the module, or an attribute of one of its classes: `f`, `Layer.forward`.

        The bindings of `Layer.forward` do not include those of `Layer`. A caller that relies on the method in the text has to
        check both.
        """
        owner, _, name = symbol.rpartition(".")
        found = [*self._names[owner, name], *self._everything]
        if owner and name != _EVERY_LOOKUP:  # this method may return any object for a name
            found += self._names[owner, _EVERY_LOOKUP]
        found += [each.node for each in self._attributes[name] if self._concerns(each, owner)]
        found += [each.node for each in self._unnamed if name.startswith(each.start) and self._may_concern(each, owner)]
        found += [each.node for inner in _INNARDS for each in self._attributes[inner] if _means(each.owner, symbol)]
        return _in_order(found if owner else [*found, *self._whole_module])

    def anywhere(self, name: str) -> list[ast.AST]:
        """Return the nodes that bind a name in any scope, set an attribute of its object, or contain the name as a string."""
        local = [node for (path, bound), nodes in self._names.items() if path != "" and bound == name for node in nodes]
        return _in_order([*self.of(name), *local, *self._owners[name]])

    def changes(self, name: str) -> list[ast.AST]:
        """Return the nodes that set or delete an attribute through a name, such as `name.size = 1` or `setattr(name, "size", 1)`."""
        return _in_order(self._owners[name])

    def definitions(self, symbol: str) -> list[Definition]:
        """Return the classes and functions among the bindings of a symbol in its own scope."""
        owner, _, name = symbol.rpartition(".")
        return [node for node in _in_order(self._names[owner, name]) if isinstance(node, Definition)]

    def _concerns(self, change: _Change, owner: str) -> bool:
        """Return whether a change may concern an attribute of the class `owner`, or of the module if `owner` is empty.

        A change through the first parameter of a method concerns the class of that method alone. An attribute of an instance counts,
        because it hides the method.
        """
        held_by = _receiver(change)
        return held_by is None or (held_by == owner and bool(owner))

    def _may_concern(self, change: _Change, owner: str) -> bool:
        """Return whether a change of an attribute with a computed name may concern a class, or the module if `owner` is empty."""
        if owner and (_receiver(change) == owner or _means(change.owner, owner)):
            return True
        return _receiver(change) is None and (change.scope.at_import or (not owner and self._finds_modules))

    def _push(self, nodes: Iterable[ast.AST | None], scope: _Scope) -> None:
        self._waiting += [(node, scope) for node in nodes if node is not None]

    def _bind(self, name: str | None, node: ast.AST, scope: _Scope) -> None:
        if name is not None:
            self._names[scope.path, name].append(node)

    def _change(self, name: str, node: ast.AST, owner: ast.expr | None, scope: _Scope) -> None:
        self._attributes[name].append(_Change(node, owner, scope))
        if isinstance(owner, ast.Name):
            self._owners[owner.id].append(node)

    def _visit_below(self, node: ast.AST, scope: _Scope) -> None:
        for field in node._fields:
            value = getattr(node, field, None)
            if isinstance(value, list):
                self._waiting += [(each, scope) for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and value._fields:  # operators and contexts have no fields
                self._waiting.append((value, scope))

    def _visit_named(self, node: ast.ExceptHandler | ast.MatchAs | ast.MatchStar, scope: _Scope) -> None:
        self._bind(node.name, node, scope)
        self._visit_below(node, scope)

    def _visit_mapping(self, node: ast.MatchMapping, scope: _Scope) -> None:
        self._bind(node.rest, node, scope)
        self._visit_below(node, scope)

    def _visit_argument(self, node: ast.arg, scope: _Scope) -> None:
        self._bind(node.arg, node, scope)

    def _visit_constant(self, node: ast.Constant, scope: _Scope) -> None:
        if isinstance(node.value, str) and scope.at_import:
            self._attributes[node.value].append(_Change(node, None, scope))

    def _visit_table(self, node: ast.Dict, scope: _Scope) -> None:
        """Visit a dictionary without its constant keys.

        They bind nothing until code writes the dictionary to a namespace, which is recorded there.
        """
        self._push((key for key in node.keys if not isinstance(key, ast.Constant)), scope)
        self._push(node.values, scope)

    def _visit_statement_of_text(self, node: ast.Expr, scope: _Scope) -> None:
        if not isinstance(node.value, ast.Constant):
            self._waiting.append((node.value, scope))

    def _visit_global(self, node: ast.Global | ast.Nonlocal, scope: _Scope) -> None:
        path = "" if isinstance(node, ast.Global) else None
        for name in node.names:
            self._bind(name, node, scope._replace(path=path))

    def _visit_assignment(self, node: ast.Assign | ast.AugAssign | ast.AnnAssign, scope: _Scope) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        self._push(targets, scope)
        exports = all(_is_name(target, "__all__") for target in targets)  # its strings bind no name
        self._push(_without_text(node.value) if exports else [node.value], scope)
        if isinstance(node, ast.AnnAssign):
            self._push(_without_text(node.annotation), scope)

    def _visit_comparison(self, node: ast.Compare, scope: _Scope) -> None:
        asked = [node.left, *node.comparators]
        self._followed.update(map(id, asked))
        self._push((each for each in asked if not isinstance(each, ast.Constant)), scope)

    def _visit_class(self, node: ast.ClassDef, scope: _Scope) -> None:
        self._bind(node.name, node, scope)
        self._push([*node.decorator_list, *node.bases, *node.keywords], scope)
        path = None if scope.path is None else f"{scope.path}.{node.name}".lstrip(".")
        self._push(getattr(node, "type_params", ()), scope._replace(path=None))
        self._push(node.body, scope._replace(path=path))

    def _visit_lambda(self, node: ast.Lambda, scope: _Scope) -> None:
        self._push([*node.args.defaults, *node.args.kw_defaults], scope)
        self._push([*_arguments(node.args), node.body], scope._replace(path=None, at_import=False))

    def _visit_type(self, node: ast.AST, scope: _Scope) -> None:
        """Visit a `type` statement. Its type parameters are local to it."""
        self._push([getattr(node, "name", None), getattr(node, "value", None)], scope)
        self._push(getattr(node, "type_params", ()), scope._replace(path=None))

    def _visit_type_parameter(self, node: ast.AST, scope: _Scope) -> None:
        self._bind(getattr(node, "name", None), node, scope)

    def _visit_name(self, node: ast.Name, scope: _Scope) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._bind(node.id, node, scope)
        elif id(node) in self._followed:
            return
        elif node.id in _NAMED:
            self._everything.append(node)  # it may be called under another name
        elif node.id in {"import_module", "__import__"}:
            self._finds_modules = True

    def _visit_attribute(self, node: ast.Attribute, scope: _Scope) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._change(node.attr, node, node.value, scope)
            if node.attr == "__class__" and _is_of_modules(node.value):
                self._whole_module.append(node)
        elif _is_name(node.value, "builtins") and node.attr in _NAMED and id(node) not in self._followed:
            self._everything.append(node)
        elif node.attr in _NAMESPACE_ATTRIBUTES and id(node) not in self._followed:
            self._whole_module.append(node)
        if node.attr == "__dict__" and id(node) not in self._followed:
            self._unnamed.append(_Change(node, node.value, scope))
        elif node.attr in {"modules", "import_module"}:
            self._finds_modules = True
        self._push([node.value], scope)

    def _visit_item(self, node: ast.Subscript, scope: _Scope) -> None:
        by_text = isinstance(node.slice, ast.Constant)
        reads = isinstance(node.ctx, ast.Load)
        if reads or by_text:
            self._followed.add(id(node.value))  # reading binds nothing, and a constant key is recorded by itself
        if not reads and isinstance(node.slice, ast.Constant):
            self._write_item(node.slice, node.value, scope)
        if not reads and (ast.unparse(node.slice) == "__name__" or _is_of_modules(node)):
            self._whole_module.append(node)
        self._push([node.value] if reads and by_text else [node.value, node.slice], scope)

    def _visit_call(self, node: ast.Call, scope: _Scope) -> None:
        function = node.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        builtin = isinstance(function, ast.Name) or _is_name(getattr(function, "value", None), "builtins")
        below: list[ast.AST] = [*node.args, *node.keywords]
        if builtin and name in _NAMED:
            self._followed.add(id(function))
        if name in _SETTERS and (builtin or name.startswith("__")):
            below = self._visit_setter(node, scope)
        elif builtin and name in _RUNNERS:
            self._everything.append(node)
        elif builtin and name in _NAMESPACES and id(node) not in self._followed:
            self._visit_namespace(name, node, scope)
        elif builtin and name in {"getattr", "hasattr"}:
            below = [each for n, each in enumerate(node.args) if n != 1 or not isinstance(each, ast.Constant)]
        elif isinstance(function, ast.Attribute):
            if _is_name(function.value, "__all__"):
                below = []
            if name in _READERS:
                below = [each for each in below if not isinstance(each, ast.Constant)]
            if name in _READERS or (name in _WRITERS and self._visit_update(node, function.value, scope)):
                self._followed.add(id(function.value))
        self._push([function, *below], scope)

    def _write_item(self, key: ast.Constant, table: ast.expr, scope: _Scope) -> None:
        """Record a constant key that a function writes to a namespace. At module level each constant counts already."""
        if not scope.at_import and isinstance(key.value, str) and (namespace := _namespace(table)) is not None:
            self._change(key.value, key, namespace.owner, scope)

    def _visit_namespace(self, name: str, node: ast.Call, scope: _Scope) -> None:
        """Record a call that returns a namespace as a dictionary, in which the caller may set any name."""
        if node.args:
            self._unnamed.append(_Change(node, node.args[0], scope))
        elif name == "globals" or scope.path == "":
            self._whole_module.append(node)
        elif scope.path is not None:
            self._unnamed.append(_Change(node, ast.Name(id=scope.path, ctx=ast.Load()), scope))

    def _visit_setter(self, node: ast.Call, scope: _Scope) -> list[ast.AST]:
        """Record the attribute that a call such as `setattr` sets, and return the other nodes to visit."""
        given: list[ast.expr] = list(node.args)
        if isinstance(node.func, ast.Attribute) and len(given) < (3 if "set" in node.func.attr else 2):
            given.insert(0, node.func.value)  # a method of the owner, such as `owner.__setattr__(name, value)`
        owner, key = [*given, None, None][:2]
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            self._change(key.value, node, owner, scope)
        else:
            self._unnamed.append(_Change(node, owner, scope, _start(key)))
            if isinstance(owner, ast.Name):
                self._owners[owner.id].append(node)
        return [each for each in (*node.args, *node.keywords) if each is not key]

    def _visit_update(self, node: ast.Call, table: ast.expr, scope: _Scope) -> bool:
        """Record the names that this call writes to a dictionary, its `table`; return whether all of them are constants or keywords."""
        names = node.args[0] if node.args else None
        for keyword in node.keywords:
            self._change(str(keyword.arg), keyword, None, scope)
        by_text = names is None or isinstance(names, ast.Constant)
        if isinstance(names, ast.Constant):
            self._write_item(names, table, scope)
        if isinstance(names, ast.Dict):
            keys = [key.value for key in names.keys if isinstance(key, ast.Constant)]
            by_text = len(keys) == len(names.keys)
            for key in keys:
                self._change(str(key), node, None, scope)
        return by_text and all(keyword.arg is not None for keyword in node.keywords)

    def _visit_function(self, node: _Function, scope: _Scope) -> None:
        self._bind(node.name, node, scope)
        arguments = _arguments(node.args)
        self._push([*node.decorator_list, *node.args.defaults, *node.args.kw_defaults], scope)
        for annotation in (node.returns, *(each.annotation for each in arguments)):
            self._push(_without_text(annotation), scope)
        receivers = {name: held for name, held in scope.receivers.items() if name not in {a.arg for a in arguments}}
        first = [*node.args.posonlyargs, *node.args.args][:1]
        if scope.path and first and not any(_is_name(each, "staticmethod") for each in node.decorator_list):
            receivers[first[0].arg] = (scope.path, node)
        inner = _Scope(None, at_import=False, receivers=receivers)
        self._push([*arguments, *getattr(node, "type_params", ()), *node.body], inner)

    def _visit_comprehension(self, node: _Comprehension, scope: _Scope) -> None:
        """Visit a comprehension. Its loop variables are local, a walrus binds in the scope around it, and a loop may set an attribute."""
        for each in node.generators:
            self._push([each.target], scope._replace(path=None))
            self._push([each.iter, *each.ifs], scope)
        self._push([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt], scope)

    def _visit_import(self, node: ast.Import | ast.ImportFrom, scope: _Scope) -> None:
        for alias in node.names:
            if alias.name == "*":
                self._whole_module.append(alias)
            whole = isinstance(node, ast.ImportFrom)
            self._bind(alias.asname or (alias.name if whole else alias.name.partition(".")[0]), alias, scope)
            if getattr(node, "module", None) == "sys" and alias.name == "modules":
                self._finds_modules = True
            if getattr(node, "module", None) == "builtins" and alias.name in _NAMED:
                self._everything.append(alias)

    _VISITORS: ClassVar[dict[type, Callable[..., None]]] = {
        ast.Name: _visit_name,
        ast.Constant: _visit_constant,
        ast.Attribute: _visit_attribute,
        ast.Subscript: _visit_item,
        ast.Call: _visit_call,
        ast.Compare: _visit_comparison,
        ast.Dict: _visit_table,
        ast.Expr: _visit_statement_of_text,
        **dict.fromkeys((ast.Assign, ast.AugAssign, ast.AnnAssign), _visit_assignment),
        **dict.fromkeys((ast.FunctionDef, ast.AsyncFunctionDef), _visit_function),
        ast.ClassDef: _visit_class,
        ast.Lambda: _visit_lambda,
        **dict.fromkeys((ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp), _visit_comprehension),
        **dict.fromkeys((ast.Import, ast.ImportFrom), _visit_import),
        **dict.fromkeys((ast.Global, ast.Nonlocal), _visit_global),
        **dict.fromkeys((ast.ExceptHandler, ast.MatchAs, ast.MatchStar), _visit_named),
        ast.MatchMapping: _visit_mapping,
        ast.arg: _visit_argument,
    }
    if sys.version_info >= (3, 12):
        _VISITORS[ast.TypeAlias] = _visit_type
        _VISITORS |= dict.fromkeys((ast.TypeVar, ast.ParamSpec, ast.TypeVarTuple), _visit_type_parameter)


def _start(key: ast.expr | None) -> str:
    """Return the constant text at the start of an f-string; empty for any other expression."""
    first = key.values[0] if isinstance(key, ast.JoinedStr) and key.values else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def _receiver(change: _Change) -> str | None:
    """Return the class of the method that makes a change through its first parameter; None for any other change.

    The owner is that parameter, its `__class__` or `__dict__`, or `type` or `vars` of it. A parameter that the method binds to another
    object does not count.
    """
    owner = change.owner
    match owner:
        case ast.Attribute(value=ast.Name() as inner, attr="__class__" | "__dict__"):
            owner = inner
        case ast.Call(func=ast.Name(id="type" | "vars"), args=[ast.Name() as inner]):
            owner = inner
    if not isinstance(owner, ast.Name) or owner.id not in change.scope.receivers:
        return None
    path, method = change.scope.receivers[owner.id]
    again = any(
        isinstance(node, ast.Name) and node.id == owner.id and not isinstance(node.ctx, ast.Load)
        for node in ast.walk(method)
    )
    return None if again else path


def _in_order(nodes: Iterable[ast.AST]) -> list[ast.AST]:
    once = {id(node): node for node in nodes}
    return sorted(once.values(), key=lambda node: (getattr(node, "lineno", 0), getattr(node, "col_offset", 0)))


class _Namespace(NamedTuple):
    """Dictionary of the attributes of an object."""

    owner: ast.expr | None
    """The expression of the object; None for the module that the code is in, or for that of a function or frame."""


def _namespace(node: ast.expr) -> _Namespace | None:
    """Return the namespace that an expression is, such as `globals()`, `vars(owner)` or `owner.__dict__`; None for any other."""
    match node:
        case ast.Call(func=ast.Name(id="globals") | ast.Attribute(value=ast.Name(id="builtins"), attr="globals")):
            return _Namespace(None)
        case ast.Call(
            func=ast.Name(id="vars") | ast.Attribute(value=ast.Name(id="builtins"), attr="vars"), args=[owner]
        ):
            return _Namespace(owner)
        case ast.Attribute(value=owner, attr="__dict__"):
            return _Namespace(owner)
        case ast.Attribute(attr=name) if name in _NAMESPACE_ATTRIBUTES:
            return _Namespace(None)
    return None


def _means(owner: ast.expr | None, symbol: str) -> bool:
    """Return whether an expression is a symbol, or ends with it, as `module.Layer` does with `Layer`."""
    return owner is not None and f".{ast.unparse(owner)}".endswith(f".{symbol}")


def _is_of_modules(node: ast.expr) -> bool:
    """Return whether an expression is an item of `sys.modules`."""
    return isinstance(node, ast.Subscript) and ast.unparse(node.value).rpartition(".")[2] == "modules"


def _is_name(node: object, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _arguments(args: ast.arguments) -> list[ast.arg]:
    every = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
    return [each for each in every if each is not None]


def _without_text(value: ast.expr | None) -> list[ast.expr]:
    """Return the walruses and calls in an annotation or in the value of `__all__`, whose strings bind no name."""
    return [each for each in ast.walk(value) if isinstance(each, ast.NamedExpr | ast.Call)] if value is not None else []
