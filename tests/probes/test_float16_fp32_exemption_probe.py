"""The probe of the cast of Float16Module, on releases that are recorded and on made-up forms."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from pathlib import Path

import pytest
from probing import Texts, parsed_once

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
    """Cast floating-point tensors without a mark."""
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
    """Return a made-up Mamba3 that creates the seven parameters and then runs the given lines."""
    lines = [f"self.{name} = make()" for name in (*MAMBA3_ALWAYS, *MAMBA3_MIMO)]
    body = "\n        ".join([*lines, *marks])
    return f"class Mamba3(Module):\n    def __init__(self, is_mimo=False):\n        {body}\n"


@pytest.mark.parametrize("text_of_mamba3", [None, mamba3()], ids=["not there", "without marks"])
def test_marks_that_are_never_set_leave_mamba3_broken(honouring: str, text_of_mamba3: str | None) -> None:
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


def test_a_class_that_is_handed_on_in_its_module_is_not_recognised(released: str) -> None:
    """No place of the record would tell it."""
    finding = examine(f"{released}\n\npatch(Float16Module)\n")

    assert finding.verdict is Verdict.UNRECOGNISED
    assert "Float16Module is used outside its class" in finding.summary()


def test_fp16_and_bf16_must_be_cast_the_same_way(released: str, honouring: str) -> None:
    mixed = honouring.replace("convert_module_to_dtype_except_fp32_marked(module, torch.half)", "module.half()")
    assert mixed not in (released, honouring)

    assert examine(mixed).verdict is Verdict.UNRECOGNISED


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

    source = release.module(module)
    assert source is not None
    edited = Texts({module: source.text.replace(old, new) if old else f"{new}\n"}, release)

    assert probe(release).verdict is Verdict.BROKEN
    finding = probing.examine(OVERLAY, edited)

    assert finding.verdict is Verdict.UNRECOGNISED
    assert "saved under wrong names" in finding.summary()
