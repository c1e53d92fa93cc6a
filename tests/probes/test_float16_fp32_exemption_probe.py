"""The cast of Float16Module in releases that were read, and in forms that nobody has seen yet."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from probing import parsed_once

from megacpp_overlays.feature_probes.float16_fp32_exemption import BLANKET_CAST, MARKS_HONOURED, TARGET, probe
from megacpp_overlays.fp32_marks import MAMBA3, MAMBA3_ALWAYS, MAMBA3_MIMO
from megacpp_overlays.loader import probing
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.overlays.float16_fp32_exemption import OVERLAY
from megacpp_overlays.source.trees import ModuleSource

CONVERSION = '''
def convert_module_to_dtype_except_fp32_marked(
    module: torch.nn.Module, dtype: torch.dtype
) -> torch.nn.Module:
    """Cast what is floating and carries no mark."""
    return module._apply(
        lambda tensor: (
            tensor.to(dtype)
            if tensor.is_floating_point() and not getattr(tensor, 'keep_in_fp32', False)
            else tensor
        )
    )


'''
"""The code of main; the docstring is ours."""


class TextTree:
    """Modules given as text."""

    def __init__(self, **modules: str) -> None:
        self.modules = {name.replace("__", "."): text for name, text in modules.items()}

    def module(self, name: str) -> ModuleSource | None:
        text = self.modules.get(name)
        return None if text is None else ModuleSource(name, f"{name}.py", text)


def examine(text: str, mamba3: str | None = None) -> Finding:
    tree = TextTree()
    tree.modules[TARGET.module] = text
    if mamba3 is not None:
        tree.modules[MAMBA3.rpartition(".")[0]] = mamba3
    return probing.examine(OVERLAY, tree)


@pytest.fixture(scope="module")
def released(wheel: Callable[[str, str], Path]) -> str:
    """The text of the newest release."""
    source = parsed_once(wheel("megatron-core", "0.19.2")).module(TARGET.module)
    assert source is not None
    return source.text


@pytest.fixture(scope="module")
def honouring(released: str) -> str:
    """The newest release with the casts of main: a conversion that honours marks."""
    text = released.replace("class Float16Module(", f"{CONVERSION}class Float16Module(")
    for old, dtype in (("half", "half"), ("bfloat16", "bfloat16")):
        text = text.replace(f"module.{old}()", f"convert_module_to_dtype_except_fp32_marked(module, torch.{dtype})")
    return text


def mamba3(*marks: str) -> str:
    """A Mamba3 of our own that creates the seven parameters, and what it does with them afterwards."""
    lines = [f"self.{name} = make()" for name in (*MAMBA3_ALWAYS, *MAMBA3_MIMO)]
    body = "\n        ".join([*lines, *marks])
    return f"class Mamba3(Module):\n    def __init__(self, is_mimo=False):\n        {body}\n"


def test_a_tree_without_megatron_is_absent() -> None:
    assert probe(TextTree()).verdict is Verdict.ABSENT


def test_a_module_without_the_class_is_absent() -> None:
    assert examine("class Other: pass").verdict is Verdict.ABSENT


def test_a_class_that_moved_elsewhere_is_not_absent() -> None:
    assert examine("from megatron.core.precision import Float16Module").verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize("text_of_mamba3", [None, mamba3()], ids=["not there", "without marks"])
def test_marks_that_nobody_sets_leave_mamba3_broken(honouring: str, text_of_mamba3: str | None) -> None:
    finding = examine(honouring, text_of_mamba3)

    assert (finding.verdict, finding.shape) == (Verdict.BROKEN, MARKS_HONOURED)


@pytest.mark.parametrize(
    "marks",
    [
        [f"self.{name}.keep_in_fp32 = True" for name in (*MAMBA3_ALWAYS, *MAMBA3_MIMO)],
        [f"mark_keep_in_fp32(self.{name})" for name in (*MAMBA3_ALWAYS, *MAMBA3_MIMO)],
        [f"self.{name} = module.mark_keep_in_fp32(make())" for name in (*MAMBA3_ALWAYS, *MAMBA3_MIMO)],
        [
            "for each in (self.dt_bias, self.D, self.B_bias, self.C_bias):\n            each.keep_in_fp32 = True",
            "if is_mimo:\n            for each in [self.mimo_x, self.mimo_z, self.mimo_o]:\n"
            "                each.keep_in_fp32 = True",
        ],
        ["self.dt_bias.keep_in_fp32 = True"],
        ["self.apply(keep_in_fp32)"],
    ],
    ids=["attribute", "call", "assigned", "loops", "one of them", "in an unknown way"],
)
def test_a_mamba3_that_mentions_the_mark_was_not_read(honouring: str, marks: list[str]) -> None:
    assert examine(honouring, mamba3(*marks)).verdict is Verdict.UNRECOGNISED


def test_marks_in_mamba3_do_not_help_where_nothing_honours_them(released: str) -> None:
    marks = [f"self.{name}.keep_in_fp32 = True" for name in (*MAMBA3_ALWAYS, *MAMBA3_MIMO)]

    assert examine(released, mamba3(*marks)).shape == BLANKET_CAST


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tensor.to(dtype)", "tensor.to(torch.bfloat16)"),
        ("not getattr", "getattr"),
        ("'keep_in_fp32'", "'_keep_fp32'"),
        (", False)", ", True)"),
        ("tensor.is_floating_point() and ", ""),
        (" and not", " or not"),
        ("else tensor", "else tensor.float()"),
        ("dtype: torch.dtype", "dtype: torch.dtype, keep=True"),
        ("def convert", "@cached\ndef convert"),
        ("module._apply", "module.apply"),
        ("    return module", "    module.eval()\n    return module"),
        ("def convert_module_to_dtype_except_fp32_marked(", "def other("),
    ],
)
def test_a_conversion_that_chooses_differently_is_not_recognised(honouring: str, old: str, new: str) -> None:
    changed = CONVERSION.replace(old, new)
    assert changed != CONVERSION

    assert examine(honouring.replace(CONVERSION, changed)).verdict is Verdict.UNRECOGNISED


def test_a_conversion_that_is_bound_again_is_not_recognised(honouring: str) -> None:
    text = f"{honouring}\nconvert_module_to_dtype_except_fp32_marked = other\n"

    assert examine(text).verdict is Verdict.UNRECOGNISED


# Mutations of the real text: nothing that was changed may be installed on.


def constructor(syntax: ast.Module) -> ast.FunctionDef:
    cls = next(node for node in syntax.body if isinstance(node, ast.ClassDef) and node.name == "Float16Module")
    return next(node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")


def blocks(function: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function):
        for name in ("body", "orelse"):
            if isinstance(block := getattr(node, name, None), list) and block:
                yield block


def words(function: ast.FunctionDef) -> list[tuple[ast.AST, str]]:
    """The places of every name and string in the constructor that changes what it does."""
    ignored = {id(node) for argument in function.args.args for node in ast.walk(argument.annotation or argument)}
    ignored |= {id(node) for error in ast.walk(function) if isinstance(error, ast.Raise) for node in ast.walk(error)}
    places = [(node, name) for node in ast.walk(function) for name in ("id", "attr", "arg", "value")]
    return [
        (node, name)
        for node, name in places
        if isinstance(getattr(node, name, None), str) and (id(node) not in ignored or isinstance(node, ast.arg))
    ]


@pytest.fixture(scope="module", params=["released", "honouring"])
def text(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)


def is_known(syntax: ast.Module) -> bool:
    return examine(ast.unparse(ast.fix_missing_locations(syntax))).verdict is Verdict.BROKEN


def test_layout_comments_and_docstrings_do_not_matter(text: str) -> None:
    syntax = ast.parse(text)
    constructor(syntax).body.insert(0, ast.Expr(ast.Constant("Wrap a module.")))

    assert is_known(syntax)
    assert examine(text.replace("if self.fp16:", "if self.fp16:  # half\n")).verdict is Verdict.BROKEN


@pytest.mark.full
@pytest.mark.unmeasured
def test_no_statement_may_be_missing_or_doubled(text: str) -> None:
    count = sum(len(block) for block in blocks(constructor(ast.parse(text))))
    assert count > 12
    for position in range(count):
        for replacement in (0, 2):
            syntax = ast.parse(text)
            owners = [(block, index) for block in blocks(constructor(syntax)) for index in range(len(block))]
            block, index = owners[position]
            block[index : index + 1] = [block[index]] * replacement or [ast.Pass()]
            assert not is_known(syntax), ast.unparse(constructor(syntax))


@pytest.mark.full
@pytest.mark.unmeasured
def test_no_word_may_be_another(text: str) -> None:
    count = len(words(constructor(ast.parse(text))))
    assert count > 40
    for position in range(count):
        syntax = ast.parse(text)
        node, name = words(constructor(syntax))[position]
        setattr(node, name, f"{getattr(node, name)}_x")
        assert not is_known(syntax), ast.unparse(constructor(syntax))


@pytest.mark.full
@pytest.mark.unmeasured
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_no_statement_may_be_added_or_moved(text: str, data: st.DataObject) -> None:
    syntax = ast.parse(text)
    init = constructor(syntax)
    block = data.draw(st.sampled_from(list(blocks(init))))
    place = data.draw(st.integers(0, len(block)))
    added = data.draw(
        st.sampled_from(["module = wrap(module)", "self.mode = 1", "return", "assert module", "module.float()"])
    )
    if data.draw(st.booleans()) and len(init.body) > 2:
        first = data.draw(st.integers(0, len(init.body) - 2))
        init.body[first], init.body[-1] = init.body[-1], init.body[first]
    else:
        block.insert(place, ast.parse(added).body[0])

    assert not is_known(syntax)


@pytest.mark.unmeasured
@settings(deadline=None, max_examples=20)
@given(place=st.integers(1, 3), default=st.booleans(), keyword_only=st.booleans())
def test_no_parameter_may_be_added(text: str, place: int, *, default: bool, keyword_only: bool) -> None:
    syntax = ast.parse(text)
    args = constructor(syntax).args
    if keyword_only:
        args.kwonlyargs, args.kw_defaults = [ast.arg("dtype")], [ast.Constant(None) if default else None]
    else:
        args.args.insert(place, ast.arg("dtype"))
        args.defaults = [ast.Constant(None)] if default and place == 3 else []

    assert not is_known(syntax)


@pytest.mark.parametrize(
    "tail",
    [
        "Float16Module = wrap(Float16Module)",
        "Float16Module.__init__ = other",
        "setattr(Float16Module, '__init__', other)",
        "del Float16Module",
        "from elsewhere import Float16Module",
        "import elsewhere as Float16Module",
        "class Float16Module: pass",
        "def Float16Module(config, module): return module",
        "patch(Float16Module)",
        "if flag:\n    class Float16Module(MegatronModule): pass",
    ],
)
def test_the_class_may_not_be_touched_after_it_was_defined(text: str, tail: str) -> None:
    assert examine(f"{text}\n\n{tail}\n").verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("class Float16Module(MegatronModule)", "@patched\nclass Float16Module(MegatronModule)"),
        ("class Float16Module(MegatronModule)", "class Float16Module(MegatronModule, Extra)"),
        ("class Float16Module(MegatronModule)", "class Float16Module(MegatronModule, metaclass=Meta)"),
        ("    def set_input_tensor", "    def add_module(self, *args): ...\n\n    def set_input_tensor"),
        ("    def set_input_tensor", "    __init__ = patched(__init__)\n\n    def set_input_tensor"),
        ("    def set_input_tensor", "    def __init__(self, *args): ...\n\n    def set_input_tensor"),
    ],
)
def test_the_class_may_not_be_built_differently(text: str, old: str, new: str) -> None:
    before, separator, after = text.partition("class Float16Module(")
    changed = before + (separator + after).replace(old, new, 1)
    assert changed != text

    assert examine(changed).verdict is Verdict.UNRECOGNISED


def test_a_decorated_constructor_is_not_recognised(text: str) -> None:
    syntax = ast.parse(text)
    constructor(syntax).decorator_list = [ast.Name("patched")]

    assert not is_known(syntax)


def test_a_class_under_a_condition_is_not_recognised(text: str) -> None:
    syntax = ast.parse(text)
    index = next(i for i, node in enumerate(syntax.body) if getattr(node, "name", None) == "Float16Module")
    syntax.body[index] = ast.If(ast.Name("flag"), [syntax.body[index]], [])

    assert not is_known(syntax)


def test_a_renamed_class_is_not_installed_on(text: str) -> None:
    assert examine(text.replace("Float16Module", "HalfModule")).verdict is not Verdict.BROKEN


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("module.half()", "module.bfloat16()"),
        ("module.bfloat16()", "module.half()"),
        ("module.bfloat16()", "module"),
        ("module.bfloat16()", "module.bfloat16(True)"),
        ("module.bfloat16()", "keep(module.bfloat16())"),
        ("module.bfloat16()", "module.to(torch.bfloat16)"),
        ("module.bfloat16()", "copy.deepcopy(module).bfloat16()"),
        ("elif self.bf16:", "else:\n            pass\n        if self.bf16:"),
        ("if self.fp16:", "if self.fp16 and module.training:"),
        ("val.bfloat16()", "val.half()"),
    ],
)
def test_another_cast_is_not_recognised(released: str, old: str, new: str) -> None:
    start = released.index("class Float16Module(")
    changed = released[:start] + released[start:].replace(old, new, 1)
    assert changed != released

    assert examine(changed).verdict is Verdict.UNRECOGNISED


def test_fp16_and_bf16_must_be_cast_the_same_way(released: str, honouring: str) -> None:
    mixed = honouring.replace("convert_module_to_dtype_except_fp32_marked(module, torch.half)", "module.half()")
    assert mixed not in (released, honouring)

    assert examine(mixed).verdict is Verdict.UNRECOGNISED


def test_text_that_does_not_parse_is_not_recognised(released: str) -> None:
    assert examine(f"{released}\n)").verdict is Verdict.UNRECOGNISED


def test_the_probe_leaves_the_tree_as_it_was(released: str) -> None:
    source = ModuleSource(TARGET.module, "module.py", released)
    before = copy.deepcopy(source.syntax)
    tree = TextTree()
    tree.module = lambda name: source if name == TARGET.module else None  # type: ignore[method-assign]

    probe(tree)

    assert ast.dump(source.syntax) == ast.dump(before)


@pytest.mark.parametrize("edit", [("(MixedPrecisionOptimizer)", "(Another)"), ("", "from .moved import *")])
@pytest.mark.parametrize("module", ["megatron.core.optimizer.optimizer", "megatron.core.optimizer.distrib_optimizer"])
def test_where_an_optimizer_is_not_known_fp32_parameters_are_not_kept(
    module: str, edit: tuple[str, str], wheel: Callable[[str, str], Path]
) -> None:
    old, new = edit
    release = parsed_once(wheel("megatron-core", "0.19.2"))

    class Edited:
        def module(self, name: str) -> ModuleSource | None:
            source = release.module(name)
            if source is None or name != module:
                return source
            return ModuleSource(name, source.path, source.text.replace(old, new) if old else f"{new}\n")

    assert probe(release).verdict is Verdict.BROKEN
    finding = probing.examine(OVERLAY, Edited())

    assert finding.verdict is Verdict.UNRECOGNISED
    assert "saved under wrong names" in finding.summary()
