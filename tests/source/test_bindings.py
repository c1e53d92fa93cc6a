"""Detection of code that binds a name to another value than its definition, without false alarms."""

from __future__ import annotations

import ast
import sys
import textwrap
from types import FunctionType, ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_overlays.errors import SourceError
from megacpp_overlays.source.bindings import Bindings
from megacpp_overlays.source.definitions import binders
from megacpp_overlays.source.trees import ModuleSource

MODULE = """
import builtins
import contextlib
import operator
import sys
import types
from importlib import import_module

class Anything:
    def __getattr__(self, name):
        return Anything()

def other(*args, **keywords):
    return other

class Layer:
    def forward(self):
        return "as it was"

    def __init__(self):
        self.weight = 1

class Unrelated:
    def forward(self):
        self.read = 1

def read():
    return "as it was"
"""

REBINDS = r"""
def read(): ...
async def read(): ...
class read: ...
read = other
read: object = other
read, first = other, 1
[read, *first] = other, 1
first, *read = 1, 2
(first := (read := other))
first = [(read := each) for each in (1, 2)]
first = {each: (read := each) for each in (1, 2)}
first = sum((read := each) for each in (1, 2))
read = first = other
for read in (1, 2): pass
for first, (read, second) in [(1, (2, 3))]: pass
for Layer.forward in (1, 2): pass
with contextlib.nullcontext(other) as read: pass
with contextlib.nullcontext((1, 2)) as (first, read): pass
try: 1 / 0\nexcept ZeroDivisionError as read: pass
match 1:\n    case read: pass
match 1:\n    case int() as read: pass
match [1, 2]:\n    case [_, *read]: pass
match {"a": 1}:\n    case {**read}: pass
match [1, 2]:\n    case [1 | 3, read]: pass
import sys as read
from sys import path as read
from sys import path as first, modules as read
del read
def first():\n    global read\n    read = other\nfirst()
def first():\n    global read\n    import sys as read\nfirst()
class First:\n    global read\n    read = other
def first(value=(read := other)): ...
@(read := other)\ndef first(): ...
class First((read := object)): ...
def first(value: (read := int)): ...
first = lambda value=(read := other): value
setattr(sys.modules[__name__], "read", other)
builtins.setattr(sys.modules[__name__], "read", other)
put = setattr\nput(sys.modules[__name__], "re" + "ad", other)
put = builtins.setattr\nput(sys.modules[__name__], "re" + "ad", other)
from builtins import setattr as put\nput(sys.modules[__name__], "re" + "ad", other)
for name in ("re" + "ad",): setattr(sys.modules[__name__], name, other)
def first(name):\n    setattr(sys.modules[__name__], name, other)\nfirst("re" + "ad")
def first(module, name):\n    setattr(module, name, other)\nfirst(sys.modules[__name__], "re" + "ad")
def first(module):\n    module.read = other\nfirst(sys.modules[__name__])
def first():\n    import_module(__name__).read = other\nfirst()
delattr(sys.modules[__name__], "read")
types.ModuleType.__setattr__(sys.modules[__name__], "read", other)
sys.modules[__name__].__setattr__("read", other)
sys.modules[__name__].read = other
this = sys.modules[__name__]\nthis.read = other
globals()["read"] = other
def first():\n    globals()["read"] = other\nfirst()
def first():\n    globals().setdefault("first", 1), globals().pop("read")\nfirst()
def first():\n    globals().__setitem__("read", other)\nfirst()
def first():\n    del globals()["read"]\nfirst()
def first():\n    vars(sys.modules[__name__])["read"] = other\nfirst()
def first():\n    sys.modules[__name__].__dict__["read"] = other\nfirst()
def first():\n    other.__globals__["read"] = other\nfirst()
globals()["re" + "ad"] = other
globals().update(read=other)
globals().update({"read": other})
globals().update({"re" + "ad": other})
globals().update(**{"re" + "ad": other})
globals().update([("re" + "ad", other)])
globals().setdefault("first", 1) and globals().__setitem__("re" + "ad", other)
names = {"re" + "ad": other}\nglobals().update(names)
dict.update(vars(sys.modules[__name__]), {"read": other})
dict.update(sys.modules[__name__].__dict__, {"read": other})
sys.modules[__name__].__dict__.update({"read": other}, first=1)
def first():\n    vars(sys.modules[__name__]).update({"read": other})\nfirst()
globals().pop("read")
del globals()["read"]
names = globals()\nnames["re" + "ad"] = other
names = globals\nnames()["re" + "ad"] = other
def first():\n    globals()["re" + "ad"] = other\nfirst()
operator.setitem(globals(), "re" + "ad", other)
locals()["re" + "ad"] = other
vars()["re" + "ad"] = other
vars(sys.modules[__name__])["read"] = other
vars(sys.modules[__name__])["re" + "ad"] = other
vars(sys.modules[__name__]).update(read=other)
names = vars(sys.modules[__name__])\nnames["re" + "ad"] = other
def first():\n    vars(sys.modules[__name__])["re" + "ad"] = other\nfirst()
sys.modules[__name__].__dict__["read"] = other
sys.modules[__name__].__dict__["re" + "ad"] = other
sys.modules[__name__].__dict__ | {}\nsys.modules[__name__].__dict__.update(read=other)
names = sys.modules[__name__].__dict__\nnames["re" + "ad"] = other
other.__globals__["re" + "ad"] = other
names = sys._getframe().f_globals\nnames["re" + "ad"] = other
exec("read = other")
exec("re" + "ad = other")
builtins.exec("re" + "ad = other")
run = exec\nrun("re" + "ad = other")
eval("(re" + "ad := other)")
def first():\n    exec("global re" + "ad; re" + "ad = other")\nfirst()
sys.modules[__name__] = Anything()
from ast import *
read.__code__ = other.__code__
Layer.forward = other
Layer.forward: object = other
Layer.forward, first = other, 1
first = [0 for Layer.forward in [other]]
with contextlib.nullcontext(other) as Layer.forward: pass
def first():\n    Layer.forward = other\nfirst()
def first(cls):\n    cls.forward = other\nfirst(Layer)
def first():\n    setattr(Layer, "forward", other)\nfirst()
for name in ("for" + "ward",): setattr(Layer, name, other)
for name in ("ward",): setattr(Layer, f"for{name}", other)
for name in ("for",): setattr(Layer, f"{name}ward", other)
def first(name):\n    setattr(Layer, name, other)\nfirst("for" + "ward")
type.__setattr__(Layer, "forward", other)
del Layer.forward
delattr(Layer, "forward")
alias = Layer\nalias.forward = other
globals()["Layer"].forward = other
Layer.forward.__code__ = (lambda self: 2).__code__
Layer = Unrelated
class Layer:\n    def forward(self): ...
""".strip().splitlines()

REBINDS_FROM_3_12 = ["type read = int"]

REBINDS_IN_THE_CLASS = r"""
forward = other
def forward(self): ...
async def forward(self): ...
class forward: ...
for forward in (1, 2): pass
from sys import path as forward
import sys as forward
with contextlib.nullcontext(other) as forward: pass
first = (forward := other)
def first(self, value=(forward := other)): ...
locals()["for" + "ward"] = other
vars()["forward"] = other
exec("forward = other")
del forward
match 1:\n    case forward: pass
@classmethod\ndef __init_subclass__(cls): cls.forward = other
def __init__(self): self.forward = other
def __init__(self, name): setattr(self, name, other)
def __init__(self, name): setattr(self, f"for{name}", other)
def __init__(self): vars(self)["for" + "ward"] = other
def __init__(self): type(self).forward = other
def __init__(self): self.__class__.forward = other
def __init__(self):\n    def inner(): self.forward = other\n    inner()
""".strip().splitlines()

LEAVES_ALONE = r"""
read()
first = read
def first(read): return read
def first():\n    other("read", "forward")
def first():\n    read = other
def first():\n    for read in (1, 2): pass
def first(self):\n    self.weight = 2
first = lambda read: read
first = [read for read in (1, 2)]
first = {read for read in (1, 2)}
class First:\n    read = other\n    def forward(self): ...
class First:\n    def __init__(self, name): setattr(self, name, other)
class First:\n    def __init__(self): self.forward = self.read = other
class First:\n    def __init__(self, state): self.__dict__.update(state)
class First:\n    @classmethod\n    def make(cls): cls.forward = other
import read.inner as first
from sys import path as first
__all__ = ["read", "Layer"]
__all__ += ["read"]
__all__.append("read")
for name in ("ward", 1): setattr(Layer, f"weight{name}", other)
def first(module, name): setattr(module, f"weight{name}", other)
getattr(sys, "read", None)
hasattr(Layer, "forward")
first = "read" in globals()
first = globals()["read"]
first = {"read": read, "forward": 1}
first = globals().get("read")
first = sys.modules["read"]
def first(value: "read") -> "Layer": ...
first: "read" = 1
"read"
Layer().weight = 1
setattr(Layer, "weight", 1)
globals()["first"] = 1
globals().update({"first": 1}, second=2)
vars(Layer)["forward"]
first.eval()
if first == "read": pass
""".strip().splitlines()

NESTS = ["{0}", "if True:\n{1}", "try:\n{1}\nfinally:\n    pass", "for _ in [0]:\n{1}", "while True:\n{1}\n    break"]
NESTS += [
    "with contextlib.nullcontext():\n{1}",
    "match 0:\n    case 0:\n{2}",
    "try:\n    1 / 0\nexcept Exception:\n{1}",
]
NESTS += ["if False:\n    pass\nelse:\n{1}", "for _ in []:\n    pass\nelse:\n{1}"]


def forms(lines: list[str]) -> list[str]:
    return [line.replace("\\n", "\n") for line in lines]


def nested(form: str, nests: list[str]) -> str:
    for nest in nests:
        form = nest.format(form, textwrap.indent(form, "    "), textwrap.indent(form, " " * 8))
    return form


nests = st.lists(st.sampled_from(NESTS), max_size=2)
harmless = st.lists(st.sampled_from(forms(LEAVES_ALONE)), max_size=3)


def bindings(text: str) -> dict[str, list[ast.AST]]:
    found = Bindings(ast.parse(text))
    return {symbol: found.of(symbol) for symbol in ("read", "Layer", "Layer.forward")}


def means_what_was_read(text: str) -> bool:
    """Run a module, and return whether both names still mean the functions in its text."""
    module = ModuleType("module_that_rebinds")
    sys.modules[module.__name__] = module
    try:
        exec(compile(text, "module_that_rebinds.py", "exec", dont_inherit=True), module.__dict__)
        made: Any = getattr(module, "Layer", None)
        live = getattr(module, "read", None), made and made.__dict__.get("forward")
        return sys.modules[module.__name__] is module and all(
            type(each) is FunctionType and each.__code__.co_consts[-1:] == ("as it was",) for each in live
        )
    finally:
        del sys.modules[module.__name__]


@pytest.mark.parametrize("form", forms(REBINDS + (REBINDS_FROM_3_12 if sys.version_info >= (3, 12) else [])))
@settings(max_examples=10)
@given(nests=nests, before=harmless)
def test_every_way_to_bind_a_name_of_a_module_is_seen(form: str, nests: list[str], before: list[str]) -> None:
    if "import *" in form:
        nests = []
    found = bindings("\n".join([MODULE, *before, nested(form, nests)]))

    assert any(len(nodes) > 1 for nodes in found.values()), form


@pytest.mark.parametrize("form", forms(REBINDS_IN_THE_CLASS))
@settings(max_examples=10)
@given(nests=nests)
def test_every_way_to_bind_a_method_in_its_class_is_seen(form: str, nests: list[str]) -> None:
    text = MODULE.replace(
        "    def __init__(self):", textwrap.indent(nested(form, nests), "    ") + "\n\n    def last(self):"
    )

    assert len(bindings(text)["Layer.forward"]) > 1


@pytest.mark.unmeasured
@pytest.mark.parametrize("form", forms(REBINDS))
def test_the_listed_forms_do_rebind_when_they_are_run(form: str) -> None:
    """Each listed form is justified: it rebinds the name. A star import is left out, since it rebinds only the other module's names."""
    if form == "from ast import *":
        return
    assert not means_what_was_read(f"{MODULE}\n{form}")


@pytest.mark.parametrize("form", forms(LEAVES_ALONE))
@settings(max_examples=10)
@given(nests=nests, before=harmless)
def test_code_that_binds_no_such_name_is_not_taken_for_a_binding(
    form: str, nests: list[str], before: list[str]
) -> None:
    text = "\n".join([MODULE, *before, nested(form, nests)])

    assert {symbol: len(nodes) for symbol, nodes in bindings(text).items()} == {
        "read": 1,
        "Layer": 1,
        "Layer.forward": 1,
    }


@pytest.mark.parametrize("form", ["first = read = other", "def first(read): ...", "read.weight = 1", "first('read')"])
def test_a_name_can_be_asked_for_in_every_scope(form: str) -> None:
    assert len(Bindings(ast.parse(f"{MODULE}\n{form}")).anywhere("read")) > 1


def test_a_name_that_nothing_binds_has_no_bindings() -> None:
    found = Bindings(ast.parse(MODULE))

    assert found.of("missing") == found.of("Layer.missing") == found.anywhere("missing") == found.changes("Layer") == []


def test_attributes_that_are_set_on_the_value_of_a_name_are_found_by_that_name() -> None:
    found = Bindings(
        ast.parse(f"{MODULE}\nLayer.weight = 1\nsetattr(Layer, 'bias', 2)\ndel Layer.weight\nUnrelated.x = 3")
    )

    assert len(found.changes("Layer")) == 3


BINDS_X = r"""
x = 1
x += 1
x: int = 1
(y := (x := 1))
del x
for x in y: pass
import x.y
from y import z as x
f(lambda x: y)
[x for x in y]
class x: ...
def f(x): ...
def f(*, x): ...
def f():\n    global x
try: ...\nexcept E as x: ...
match y:\n    case [*x]: ...
match y:\n    case {**x}: ...
async def f():\n    async with y as x: ...
async def f():\n    async for x in y: ...
""".strip().splitlines()


@pytest.mark.parametrize("statement", forms(BINDS_X))
def test_names_bound_below_a_node_are_found_in_every_scope(statement: str) -> None:
    assert binders(ast.parse(statement), "x")


def test_names_that_are_only_read_are_not_bound() -> None:
    assert not any(binders(ast.parse("x(y=z).w = 1").body, name) for name in "xyzw")


def test_a_definition_is_not_found_where_something_else_binds_its_name() -> None:
    source = ModuleSource("made_up", "made_up.py", f"{MODULE}\nread = other")

    assert source.find("Layer.forward") is not None
    with pytest.raises(SourceError, match="read is bound elsewhere, too"):
        source.find("read")


@pytest.mark.parametrize("condition", ["True", "__import__('os').environ.get('FLAG')"])
def test_a_method_of_a_class_that_looks_every_attribute_up_by_itself_is_none_that_is_known(condition: str) -> None:
    text = f"""
class Layer:
    def forward(self):
        return 1

    if {condition}:
        def __getattribute__(self, name):
            return lambda: 2
"""
    source = ModuleSource("made", "made.py", text)

    assert source.find("Layer") is not None
    with pytest.raises(SourceError, match="forward is bound elsewhere, too"):
        source.find("Layer.forward")


@pytest.mark.parametrize(
    ("decorator", "is_of_any_class"), [("@staticmethod", True), ("", False)], ids=["static", "bound"]
)
def test_the_first_argument_of_a_static_method_may_be_of_any_class(decorator: str, is_of_any_class: bool) -> None:
    text = f"""
class Layer:
    {decorator}
    def patch(layer):
        layer.forward = None

class Other:
    def forward(self):
        return 1
"""
    changes = [each for each in Bindings(ast.parse(text)).of("Other.forward") if isinstance(each, ast.Attribute)]

    assert bool(changes) is is_of_any_class
