"""A pattern matches code that is the same but for its holes, and nothing else."""

from __future__ import annotations

import ast
import copy
import importlib
import pkgutil
from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megacpp_overlays import feature_probes
from megacpp_overlays.source.patterns import Match, Pattern

BRANCH = Pattern(
    """
    def convert(self, $value, $$options):
        $start
        $$middle
        if self.$flag:
            return $cast($value, $$arguments)
        raise $error
    """
)
CODE = '''
def convert(self, val: Tensor, dtype=None, *, copy: bool = False, **rest) -> Tensor:
    """Cast a value."""
    super().start()  # comment
    self.a: int = 1
    self.b = 2

    if self.fp16:
        return self.half(
            val, dtype, copy=copy
        )
    raise ValueError("neither")
'''


def statement(text: str) -> ast.stmt:
    (found,) = ast.parse(text).body
    return found


def match(pattern: str, code: str) -> Match | None:
    return Pattern(pattern).match(ast.parse(code))


def texts(nodes: list[ast.AST]) -> list[str]:
    return [ast.unparse(node) for node in nodes]


def test_holes_hold_the_code_in_their_place() -> None:
    found = BRANCH.match(statement(CODE))

    assert found is not None
    assert [found.text(name) for name in ("value", "flag", "cast", "error")] == [
        "val",
        "fp16",
        "self.half",
        "ValueError('neither')",
    ]
    assert found.text("start") == "super().start()"
    assert texts(found.many("middle")) == ["self.a: int = 1", "self.b = 2"]
    assert texts(found.many("arguments")) == ["dtype", "copy=copy"]
    assert texts(found.many("options")) == ["dtype", "copy: bool", "rest"]
    assert isinstance(found["error"], ast.Call)
    assert found["error"].lineno == 12


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("val, dtype, copy", "dtype, val, copy"),  # the hole holds another thing the second time
        ("self.fp16", "fp16"),
        ("raise", "return"),
        ("def convert", "async def convert"),
        ("def convert", "@cached\ndef convert"),
        ("def convert", "def converted"),
        ("val: Tensor,", "val: Tensor, /,"),
        ("(self, val: Tensor", "(self, val: Tensor = 1"),
        ("(self, ", "(cls, "),
        ("    raise", "    pass\n    raise"),
        ("    raise", "    else:\n        pass\n    raise"),
    ],
)
def test_all_code_outside_of_holes_counts(old: str, new: str) -> None:
    changed = CODE.replace(old, new, 1)
    assert changed != CODE

    assert BRANCH.match(statement(changed)) is None


@pytest.mark.parametrize(
    ("pattern", "code"),
    [
        ("1", "True"),
        ("1", "1.0"),
        ("0.0", "-0.0"),
        ("return", "return None"),
        ("x.a", "x.b"),
        ("a < b", "a <= b"),
        ("f(a, b)", "f(b, a)"),
        ("f(a=1)", "f(b=1)"),
        ("f($one)", "f()"),
        ("f($one)", "f(*many)"),
        ("f($one)", "f(a=1)"),
        ("f($one)", "f(a, b)"),
        ("def f($one): pass", "def f(*one): pass"),
        ("def f($one): pass", "def f(one=1): pass"),
        ("def f(a): pass", "def f(*, a): pass"),
        ("def f(a, b=1): pass", "def f(a=1, b=1): pass"),
        ("def f(*, a=1): pass", "def f(*, a): pass"),
        ("class A(B): pass", "class A(B, metaclass=C): pass"),
        ("return $value", "return"),
        ("x = $value", "x += 1"),
        ("x = $value", "x: int"),
        ("'$text'", "'other'"),
        ("return $$x", "return 1"),
        ("$only", "a\nb"),
        ("$x; $$y; $z", "a"),
    ],
)
def test_other_code_does_not_match(pattern: str, code: str) -> None:
    assert match(pattern, code) is None


@pytest.mark.parametrize(
    ("pattern", "code", "held"),
    [
        ("$x = $x", "a = a", {"x": "a"}),
        ("lambda $x: $x.to(dtype)", "lambda each: each.to(dtype)", {"x": "each"}),
        ("def $f(): return $f()", "def again(): return again()", {"f": "again"}),
        ("f($key=$value)", "f(a=1)", {"key": "a", "value": "1"}),
        ("from a import $name", "from a import b", {"name": "b"}),
        ("class $name($base): $$_", "class A(B):\n    'text'\n    x = 1", {"name": "A", "base": "B"}),
        ("for $_ in $items: $_", "for x in y:\n    z()", {"items": "y"}),
        ("f(x, $$_)", "f(x)", {}),
        ("def f($$_): $$_", "def f(a, /, b=1, *c, d, **e): 'text'", {}),
        ("f'{$x}'", "f'{a}'", {"x": "a"}),
        ("'$x'", "'$x'", {}),
        ("x = $value", "x: int = 1", {"value": "1"}),
        ("x: str = $value", "x = 1", {"value": "1"}),
        ("global $name", "global a", {"name": "a"}),
    ],
)
def test_holes_stand_for_names_too(pattern: str, code: str, held: dict[str, str]) -> None:
    found = match(pattern, code)

    assert found is not None
    assert {name: found.text(name) for name in held} == held


def test_a_hole_for_any_number_leaves_enough_for_the_rest() -> None:
    found = match("$$before\nmark($x)\n$$between\nmark($x)\n$$after", "mark(a)\nmark(b)\nc\nmark(b)\nd")

    assert found is not None
    assert found.text("x") == "b"
    assert [texts(found.many(name)) for name in ("before", "between", "after")] == [["mark(a)"], ["c"], ["d"]]


def test_a_hole_for_any_number_must_hold_the_same_twice() -> None:
    assert match("f($$x)\ng($$x)", "f(a, b=1)\ng(a, b=1)") is not None
    assert match("f($$x)\ng($$x)", "f(a, b=1)\ng(a, b=2)") is None


def test_an_earlier_hole_gives_way_to_a_later_one() -> None:
    found = match("f($$x, $$y)\ng($$y)", "f(a, b, c)\ng(c)")

    assert found is not None
    assert texts(found.many("x")) == ["a", "b"]


def test_matches_come_outermost_first_with_their_places() -> None:
    code = ast.parse("f(f(1))\nif x:\n    f(2)\n")

    assert [found.text("x") for found in Pattern("f($x)").find(code)] == ["f(1)", "1", "2"]
    assert [found.text("c") for found in Pattern("if $c: $$_").find(code)] == ["x"]
    (last,) = Pattern("f(2)").find(code)
    assert isinstance(last.node, ast.Call)
    assert last.node.lineno == 3


def test_one_and_many_are_asked_for_by_their_own_names() -> None:
    found = match("f($x, $$y)", "f(a, b)")

    assert found is not None
    with pytest.raises(KeyError, match="any number"):
        found["y"]
    with pytest.raises(KeyError, match="one thing"):
        found.many("x")
    with pytest.raises(KeyError):
        found["z"]


def test_nothing_matches_nothing() -> None:
    assert Pattern("$x").match(None) is None


def test_a_pattern_is_parsed_when_it_is_first_used() -> None:
    broken = Pattern("def (")

    with pytest.raises(SyntaxError):
        broken.match(ast.parse("x"))


def patterns_of_the_probes() -> Iterator[Pattern]:
    for found in pkgutil.iter_modules(feature_probes.__path__):
        module = importlib.import_module(f"{feature_probes.__name__}.{found.name}")
        yield from (value for value in vars(module).values() if isinstance(value, Pattern))


def test_every_pattern_of_a_probe_parses() -> None:
    for pattern in patterns_of_the_probes():
        assert pattern.match([]) is None


# Any code is matched by itself; any code with an expression cut out by the pattern with a hole there; and code with a
# word changed by neither.

NAMES = st.sampled_from(["a", "b", "c", "f"])
EXPRESSIONS = st.recursive(
    NAMES | st.sampled_from(["1", "2.0", "'t'", "None"]),
    lambda inner: st.one_of(
        st.builds("{}({}, k={})".format, NAMES, inner, inner),
        st.builds("({} + {})".format, inner, inner),
        st.builds("{}.{}".format, NAMES, NAMES),
        st.builds("[{}, {}]".format, inner, inner),
        st.builds("(lambda {}: {})".format, NAMES, inner),
    ),
    max_leaves=6,
)
STATEMENTS = st.one_of(
    st.builds("{} = {}".format, NAMES, EXPRESSIONS),
    st.builds("if {}:\n    return {}".format, EXPRESSIONS, EXPRESSIONS),
    st.builds("def {}({}, *, k={}):\n    return {}".format, NAMES, NAMES, EXPRESSIONS, EXPRESSIONS),
    st.builds("with {} as {}:\n    {}".format, EXPRESSIONS, NAMES, EXPRESSIONS),
)
PROGRAMS = st.lists(STATEMENTS, min_size=1, max_size=4).map("\n".join)


@pytest.mark.unmeasured
@settings(deadline=None, max_examples=100)
@given(program=PROGRAMS)
def test_code_matches_itself(program: str) -> None:
    assert match(program, program) is not None
    assert match(f"$$before\n{program}\n$$after", f"x\n{program}\nx\nx") is not None


@settings(deadline=None, max_examples=100)
@given(program=PROGRAMS, data=st.data())
def test_a_hole_holds_the_code_that_was_cut_out(program: str, data: st.DataObject) -> None:
    syntax = ast.parse(program)
    loads = [node for node in ast.walk(syntax) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    if not loads:
        return
    cut = data.draw(st.sampled_from(loads))
    held, cut.id = cut.id, "HOLE"

    found = match(ast.unparse(syntax).replace("HOLE", "$hole"), program)

    assert found is not None
    assert found.text("hole") == held


@settings(deadline=None, max_examples=100)
@given(program=PROGRAMS, data=st.data())
def test_no_word_of_the_code_may_be_another(program: str, data: st.DataObject) -> None:
    syntax = ast.parse(program)
    places = [
        (node, name)
        for node in ast.walk(syntax)
        for name in ("id", "attr", "arg", "name", "value")
        if isinstance(getattr(node, name, None), str | int | float)
    ]
    assume(places)
    node, name = data.draw(st.sampled_from(places))
    changed = copy.deepcopy(getattr(node, name))
    setattr(node, name, f"{changed}_x" if isinstance(changed, str) else changed + 1)

    assert match(program, ast.unparse(syntax)) is None
