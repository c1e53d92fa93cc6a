"""Mechanical mutants of the text of a module, one at a time and from a seeded source of chance."""

from __future__ import annotations

import ast
import bisect
import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from random import Random

from adversary.outline import EVERYTHING, LOOSE, Function, Outline, is_text

ELSEWHERE = "_elsewhere"
"""A replacement for a name. Nothing defines it: no mutant is ever run."""


@dataclass(frozen=True)
class Mutant:
    """A text that was changed."""

    kind: str
    """The class of mutation, one of `KINDS`."""
    label: str
    """The mutation within that class, and its place."""
    before: str
    text: str
    rebound: frozenset[str] = frozenset()
    """Names whose meaning the mutation changes, whatever the text says of them."""
    is_harmless: bool = False
    """Whether the mutation, by its kind, keeps the meaning of the text."""

    def hunk(self, name: str = "") -> str:
        """Return the change, as a unified diff."""
        lines = difflib.unified_diff(self.before.splitlines(), self.text.splitlines(), name, name, "", "", 2, "")
        return "\n".join(lines)


class Module:
    """A text to mutate, with the places in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.raw = text.encode()
        self.outline = Outline(text)
        self._starts = [0]
        for line in self.raw.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    def definitions(self, symbols: Collection[str]) -> list[str]:
        """Return the definitions among names; all of the module where there is none."""
        own = self.outline.definitions
        found = sorted({each for symbol in symbols for each in own if each == symbol or each.startswith(f"{symbol}.")})
        return found or sorted(own)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the first byte of a node, its decorators included, and the one after its last."""
        first: ast.AST = min(
            [node, *getattr(node, "decorator_list", ())], key=lambda each: (each.lineno, each.col_offset)
        )
        start = self._starts[first.lineno - 1] + first.col_offset
        if first is not node:
            start = self.raw.rindex(b"@", 0, start)
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def code(self, node: ast.AST) -> str:
        """Return the text of a node."""
        start, end = self.span(node)
        return self.raw[start:end].decode()

    def with_(self, *changes: tuple[ast.AST, str]) -> str:
        """Return the text with other code for some nodes, none of which lies in another."""
        raw = self.raw
        for node, code in sorted(changes, key=lambda each: self.span(each[0]), reverse=True):
            start, end = self.span(node)
            raw = raw[:start] + code.encode() + raw[end:]
        return raw.decode()

    def indent(self, statement: ast.AST) -> str | None:
        """Return the white space before a statement; None where it does not begin its line."""
        start = self.span(statement)[0]
        line = self._starts[bisect.bisect_right(self._starts, start) - 1]
        before = self.raw[line:start].decode()
        return before if not before.strip() else None


Mutator = Callable[[Module, Random, str], "Mutant | None"]
"""Gets the module, the source of chance and the definition that it is to mutate."""


def _inside(module: Module, symbol: str, *kinds: type[ast.AST]) -> list[ast.AST]:
    node = module.outline.definitions[symbol]
    return [each for each in ast.walk(node) if isinstance(each, kinds) and each is not node]


def _statements(module: Module, symbol: str) -> list[tuple[list[ast.stmt], int, str]]:
    """Return bodies below a definition with the places in them at which a statement begins its line, and its indent."""
    found: list[tuple[list[ast.stmt], int, str]] = []
    for node in ast.walk(module.outline.definitions[symbol]):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list):
                for place, each in enumerate(body):
                    if not is_text(each) and (indent := module.indent(each)) is not None:
                        found.append((body, place, indent))
    return found


def _below(head: str, code: str, indent: str) -> str:
    """Return code in a block; the lines of a text in it move as well, which is a mutation too."""
    return f"{head}\n{indent}    " + code.replace("\n", "\n    ")


def _statement(module: Module, rng: Random, symbol: str) -> Mutant | None:
    if not (found := _statements(module, symbol)):
        return None
    body, place, indent = rng.choice(found)
    node, code = body[place], module.code(body[place])
    match how := rng.choice(["deleted", "doubled", "moved"]):
        case "deleted":
            text = module.with_((node, "pass"))
        case "doubled":
            text = module.with_((node, f"{code}\n{indent}{code}"))
        case _:
            if place + 1 == len(body) or module.indent(body[place + 1]) is None:
                return None
            text = module.with_((node, module.code(body[place + 1])), (body[place + 1], code))
    return Mutant("statement", f"{how} in {symbol}", module.text, text)


_OTHER = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Is: "is not", ast.IsNot: "is",
    ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/",
    ast.MatMult: "*", ast.Mod: "//", ast.Pow: "*", ast.BitAnd: "|", ast.BitOr: "&", ast.And: "or", ast.Or: "and",
}  # fmt: skip


def _operand(module: Module, rng: Random, symbol: str) -> Mutant | None:
    nodes = _inside(
        module, symbol, ast.Compare, ast.BinOp, ast.Constant, ast.Name, ast.Call, ast.Attribute, ast.keyword
    )
    joined = [each for outer in _inside(module, symbol, ast.JoinedStr) for each in ast.walk(outer)]
    nodes = [each for each in nodes if all(each is not other for other in joined)]
    if not nodes:
        return None
    kind = rng.choice(sorted({type(each).__name__ for each in nodes}))
    node = rng.choice([each for each in nodes if type(each).__name__ == kind])
    new: str | None = None
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OTHER:
            new = f"({module.code(left)} {_OTHER[type(op)]} {module.code(right)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OTHER:
            new = f"(({module.code(left)}) {_OTHER[type(op)]} ({module.code(right)}))"
        case ast.Constant(value=bool() as value):
            new = repr(not value)
        case ast.Constant(value=int() | float() as value):
            new = repr(value + 1)
        case ast.Constant(value=None):
            new = "False"
        case ast.Name(id=name, ctx=ast.Load()):
            others = sorted({each.id for each in _inside(module, symbol, ast.Name)} - {name})  # type: ignore[attr-defined]
            new = rng.choice(others) if others else None
        case ast.Call(args=[*_, first, second]):
            return Mutant(
                "operand",
                f"arguments swapped in {symbol}",
                module.text,
                module.with_((first, module.code(second)), (second, module.code(first))),
            )
        case ast.Attribute(value=value, attr=attr, ctx=ast.Load()):
            new = f"{module.code(value)}.{attr}_"
        case ast.keyword(arg=str(arg), value=value):
            new = f"{arg}=None" if module.code(value) != "None" else f"{arg}=True"
    return Mutant("operand", f"{kind} in {symbol}", module.text, module.with_((node, new))) if new is not None else None


def _condition(module: Module, rng: Random, symbol: str) -> Mutant | None:
    tests = [each.test for each in _inside(module, symbol, ast.If, ast.IfExp, ast.While, ast.Assert)]  # type: ignore[attr-defined]
    tests += [test for each in _inside(module, symbol, ast.comprehension) for test in each.ifs]  # type: ignore[attr-defined]
    if not tests:
        return None
    test = rng.choice(tests)
    how = rng.choice(["not ({})", "({}) and False", "({}) or True"])
    return Mutant(
        "condition", f"{how} in {symbol}", module.text, module.with_((test, f"({how.format(module.code(test))})"))
    )


REBINDS: Mapping[str, str] = {
    "assignment": "{n} = _elsewhere",
    "wrapped": "{n} = _elsewhere({n})",
    "tuple": "{n}, _other = _elsewhere",
    "starred": "_other, *{n} = _elsewhere",
    "augmented": "{n} += _elsewhere",
    "annotated": "{n}: object = _elsewhere",
    "item of globals": "globals()['{n}'] = _elsewhere",
    "globals updated": "globals().update({n}=_elsewhere)",
    "globals with a table": "globals().update({{'{n}': _elsewhere}})",
    "globals joined": "globals().__ior__({{'{n}': _elsewhere}})",
    "vars": "vars()['{n}'] = _elsewhere",
    "locals": "locals()['{n}'] = _elsewhere",
    "alias of globals": "_names = globals()\n_names['{n}'] = _elsewhere",
    "setattr of the module": "import sys\nsetattr(sys.modules[__name__], '{n}', _elsewhere)",
    "attribute of the module": "import sys\nsys.modules[__name__].{n} = _elsewhere",
    "names of the module": "import sys\nsys.modules[__name__].__dict__['{n}'] = _elsewhere",
    "module replaced": "import sys\nsys.modules[__name__] = _elsewhere",
    "imported itself": "import importlib\nimportlib.import_module(__name__).{n} = _elsewhere",
    "deleted": "del {n}",
    "star": "from _elsewhere import *",
    "import": "from _elsewhere import {n}",
    "import as": "import _elsewhere as {n}",
    "from import as": "from _elsewhere import other as {n}",
    "except as": "try:\n    _elsewhere()\nexcept Exception as {n}:\n    pass",
    "match capture": "match _elsewhere:\n    case {n}:\n        pass",
    "match star": "match _elsewhere:\n    case [_, *{n}]:\n        pass",
    "match rest": "match _elsewhere:\n    case {{'a': 1, **{n}}}:\n        pass",
    "walrus": "print({n} := _elsewhere)",
    "walrus in a comprehension": "[{n} := each for each in _elsewhere]",
    "loop": "for {n} in _elsewhere:\n    pass",
    "with": "with _elsewhere() as {n}:\n    pass",
    "defined again": "def {n}(*args, **options):\n    return _elsewhere(*args, **options)",
    "class again": "class {n}:\n    pass",
    "global": "def _patch():\n    global {n}\n    {n} = _elsewhere\n\n\n_patch()",
    "global in a class": "class _Patch:\n    global {n}\n    {n} = _elsewhere",
    "exec": "exec(_elsewhere)",
    "exec of a text": "exec('{n} = _elsewhere')",
}
"""Ways to bind a name of a module to something else."""
MEMBERS: Mapping[str, str] = {
    "attribute": "{c}.{m} = _elsewhere",
    "setattr": "setattr({c}, '{m}', _elsewhere)",
    "setattr of type": "type.__setattr__({c}, '{m}', _elsewhere)",
    "attribute deleted": "del {c}.{m}",
    "attribute in a loop": "for {c}.{m} in _elsewhere:\n    pass",
    "attribute by with": "with _elsewhere() as {c}.{m}:\n    pass",
    "in a function": "def _patch():\n    {c}.{m} = _elsewhere\n\n\n_patch()",
    "by an alias": "_alias = {c}\n_alias.{m} = _elsewhere",
    "by an argument": "def _patch(cls):\n    cls.{m} = _elsewhere\n\n\n_patch({c})",
    "setattr in a lambda": "(lambda cls: setattr(cls, '{m}', _elsewhere))({c})",
    "by globals": "globals()['{c}'].{m} = _elsewhere",
    "by a tuple": "{c}.{m}, _other = _elsewhere",
}
"""Ways to give a class another member."""
IN_CLASS: Mapping[str, str] = {
    "assignment": "{m} = _elsewhere",
    "wrapped": "{m} = _elsewhere({m})",
    "defined again": "def {m}(self, *args, **options):\n    return _elsewhere(*args, **options)",
    "vars": "vars()['{m}'] = _elsewhere",
    "locals": "locals()['{m}'] = _elsewhere",
    "import": "from _elsewhere import {m}",
    "deleted": "del {m}",
    "exec": "exec(_elsewhere)",
    "walrus": "print({m} := _elsewhere)",
    "loop": "for {m} in _elsewhere:\n    pass",
    "__getattribute__": "def __getattribute__(self, name):\n    return _elsewhere",
}
"""The same in the body of the class."""
FLAG = "if __import__('os').environ.get('FLAG'):"
DEAD = ("if 0:", "if False:", "while 0:")


def _rebinding(module: Module, rng: Random, symbol: str) -> tuple[str, str, frozenset[str], bool]:
    """Return a name for a way to rebind a definition, the code, the names that it changes, and whether the code goes into the class."""
    owner, _, name = symbol.rpartition(".")
    ways = [(key, code, "module") for key, code in REBINDS.items()]
    if owner and "." not in owner:
        ways = rng.choice(
            [
                ways,
                *[
                    [(key, code, where) for key, code in table.items()]
                    for table, where in ((MEMBERS, "member"), (IN_CLASS, "class"))
                ],
            ]
        )
    key, code, where = rng.choice(ways)
    code = code.format(n=owner.partition(".")[0] or name, c=owner, m=name)
    whole = key in {"star", "exec", "module replaced"} and where == "module"
    changed = EVERYTHING if whole else symbol if where != "module" else symbol.partition(".")[0]
    if key == "__getattribute__" and name.startswith("__"):
        changed = f"{owner}.{key}"  # Python asks the class for those, and not this
    return f"{where}, {key}: {symbol}", code, frozenset({changed}), where == "class"


def _placed(module: Module, code: str, symbol: str, *, in_class: bool) -> str:
    if not in_class:
        return f"{module.text.rstrip()}\n\n\n{code}\n"
    last = module.outline.definitions[symbol.rpartition(".")[0]].body[-1]
    indent = module.indent(last) or "    "
    added = "\n".join(f"{indent}{line}" if line else line for line in code.split("\n"))
    return module.with_((last, f"{module.code(last)}\n\n{added}"))


def _binding(module: Module, rng: Random, symbol: str) -> Mutant | None:
    label, code, changed, in_class = _rebinding(module, rng, symbol)
    return Mutant("binding", label, module.text, _placed(module, code, symbol, in_class=in_class), changed)


def _decorator(module: Module, rng: Random, symbol: str) -> Mutant | None:
    node = module.outline.definitions[symbol]
    if (indent := module.indent(node)) is None:
        return None
    start = module.span(node)[0]
    if node.decorator_list and rng.random() < 0.5:
        gone = rng.choice(node.decorator_list)
        raw, (first, last) = module.raw, module.span(gone)
        text = (raw[: raw.rindex(b"@", 0, first)] + raw[last:].lstrip()).decode()
        return Mutant("decorator", f"removed from {symbol}", module.text, text)
    text = (module.raw[:start] + f"@{ELSEWHERE}\n{indent}".encode() + module.raw[start:]).decode()
    return Mutant("decorator", f"added to {symbol}", module.text, text, frozenset({symbol}))


def _around(module: Module, rng: Random, symbol: str, kind: str, heads: Collection[str]) -> Mutant | None:
    """Put a statement, a whole definition, or a rebinding into a block."""
    head = rng.choice(sorted(heads))
    match rng.choice(["statement", "definition", "rebinding"]):
        case "definition":
            node = module.outline.definitions[symbol]
            indent = module.indent(node)
            if indent is None:
                return None
            text = module.with_((node, _below(head, module.code(node), indent)))
            return Mutant(kind, f"{head} around {symbol}", module.text, text, frozenset({symbol}))
        case "rebinding":
            label, code, changed, in_class = _rebinding(module, rng, symbol)
            text = _placed(module, _below(head, code, ""), symbol, in_class=in_class)
            dead = head in DEAD
            return Mutant(kind, f"{head} {label}", module.text, text, frozenset() if dead else changed, dead)
    if not (found := _statements(module, symbol)):
        return None
    body, place, indent = rng.choice(found)
    text = module.with_((body[place], _below(head, module.code(body[place]), indent)))
    return Mutant(kind, f"{head} around a statement of {symbol}", module.text, text)


def _dead(module: Module, rng: Random, symbol: str) -> Mutant | None:
    if rng.random() < 0.7 or not isinstance(module.outline.definitions[symbol], Function):
        return _around(module, rng, symbol, "dead code", DEAD)
    if not (found := _statements(module, symbol)):
        return None
    body, place, indent = rng.choice(found)
    text = module.with_((body[place], f"return\n{indent}{module.code(body[place])}"))
    return Mutant("dead code", f"after a return in {symbol}", module.text, text)


def _flag(module: Module, rng: Random, symbol: str) -> Mutant | None:
    return _around(module, rng, symbol, "flag", (FLAG,))


def _text(module: Module, rng: Random, symbol: str) -> Mutant | None:
    """Put code into a comment or a string, or change nothing but those."""
    if not (found := _statements(module, symbol)):
        return None
    body, place, indent = rng.choice(found)
    node, code = body[place], module.code(body[place])
    whole = module.outline.definitions[symbol]
    how = rng.choice(["statement in a comment", "statement in a string", "definition in a string", "comment", "layout"])
    kind, rebound = "comment and string", frozenset[str]()
    match how:
        case "statement in a comment":
            text = module.with_((node, "pass" + "".join(f"\n{indent}# {line}" for line in code.split("\n"))))
        case "statement in a string":
            text = module.with_((node, repr(code)))
        case "definition in a string":
            text = module.with_((whole, repr(module.code(whole))))
            rebound = frozenset({symbol})
        case "comment":
            text = module.with_((node, f"# {ELSEWHERE} = {symbol}\n{indent}{code}"))
        case _:
            text = module.with_((node, f"{code}  # noted\n\n"))
    return Mutant(kind, f"{how}: {symbol}", module.text, text, rebound)


REEXPORTS: Mapping[str, str] = {
    "star": "from ._impl import *\n",
    "star with a docstring": '"""A module."""\n\nfrom ._impl import *  # noqa: F403\n',
    "names": "from ._impl import {n}\n",
    "names as others": "from ._impl import {n} as {n}\n\n__all__ = ['{n}']\n",
    "assignment": "from . import _impl\n\n{n} = _impl.{n}\n",
    "hook": "def __getattr__(name):\n    from . import _impl\n\n    return getattr(_impl, name)\n",
    "replaced": "import sys\n\nfrom . import _impl\n\nsys.modules[__name__] = _impl\n",
    "globals": "from . import _impl\n\nglobals().update(vars(_impl))\n",
    "tried": "try:\n    from ._impl import *\nexcept ImportError:\n    pass\n",
    "executed": "exec(open(__file__ + '.real').read())\n",
}


def _reexport(module: Module, rng: Random, symbol: str) -> Mutant | None:
    how = rng.choice(sorted(REEXPORTS))
    text = REEXPORTS[how].format(n=symbol.partition(".")[0])
    if rng.random() < 0.25:
        text = f"{module.text.rstrip()}\n\n\n{REEXPORTS['star']}"
        how = "star behind the code"
    named = "{n}" in REEXPORTS.get(how, "")
    rebound = frozenset({symbol.partition(".")[0] if named else EVERYTHING})
    return Mutant("re-export", f"{how}: {symbol}", module.text, text, rebound)


KINDS: Mapping[str, Mutator] = {
    "statement": _statement,
    "operand": _operand,
    "condition": _condition,
    "binding": _binding,
    "decorator": _decorator,
    "dead code": _dead,
    "flag": _flag,
    "comment and string": _text,
    "re-export": _reexport,
}


def mutants(text: str, rng: Random, symbols: Collection[str] = (), *, tries: int = 8) -> Iterator[Mutant]:
    """Yield mutants of a text without end, or none if there is nothing to mutate.

    Args:
        text: of a module.
        rng: where chance comes from.
        symbols: definitions that three of four are to be in.
        tries: how often a mutator may find nothing to do, before the next one has its turn.
    """
    module = Module(text)
    if not module.outline.definitions:
        return
    near, every = module.definitions(symbols), module.definitions(())
    while True:
        for mutator in KINDS.values():
            for _ in range(tries):
                chosen = near if rng.random() < 0.75 else every
                found = mutator(module, rng, rng.choice(chosen))
                if found is not None and found.text != text:
                    yield found
                    break


_CODE = re.compile(r"^\s*(?!//|\*|/\*|#)\S.*[;{})]\s*$")


def mutants_of_c(text: str, rng: Random) -> Iterator[Mutant]:
    """Yield mutants of a text in C++ without end."""
    lines = text.split("\n")
    places = [number for number, line in enumerate(lines) if _CODE.match(line)]
    ways: Mapping[str, tuple[str, Callable[[str], str]]] = {
        "deleted": ("statement", lambda _: ""),
        "doubled": ("statement", lambda line: f"{line}\n{line}"),
        "in a comment": ("comment and string", lambda line: f"// {line}"),
        "in a string": ("comment and string", lambda line: f'"{line.strip()}";'),
        "under #if 0": ("dead code", lambda line: f"#if 0\n{line}\n#endif"),
        "under if (false)": ("dead code", lambda line: f"if (false) {{\n{line}\n}}"),
        "under #ifdef": ("flag", lambda line: f"#ifdef FLAG\n{line}\n#endif"),
        "a number": ("operand", lambda line: re.sub(r"\b\d+\b", lambda each: str(int(each[0]) + 1), line)),
        "negated": ("condition", lambda line: line.replace("if (", "if (!(", 1).replace(") {", ")) {", 1)),
    }
    while places:
        how, place = rng.choice(sorted(ways)), rng.choice(places)
        kind, change = ways[how]
        changed = change(lines[place])
        if changed != lines[place]:
            new = "\n".join([*lines[:place], changed, *lines[place + 1 :]])
            yield Mutant(kind, f"line {place + 1} {how}", text, new, frozenset({LOOSE}))
