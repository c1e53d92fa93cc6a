"""The probe of A_log and D in Megatron's Mamba mixers: given trees, and unknown forms."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from probing import ParsedOnce, parsed_once

from megacpp_overlays.feature_probes.float16_mixer_parameters import (
    GATED_DELTA_PRODUCT,
    MAMBA,
    UNMARKED,
)
from megacpp_overlays.loader import probing
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.overlays.float16_mixer_parameters import PARTS
from megacpp_overlays.source.file_trees import DirectoryTree
from megacpp_overlays.source.trees import ModuleSource, SourceTree

PARALLEL = "megatron.core.ssm.mamba_context_parallel"

Wheel = Callable[[str, str], Path]


class Edited:
    """A tree with some modules given as text; None takes a module away."""

    def __init__(self, tree: SourceTree, texts: dict[str, str | None]) -> None:
        self.tree, self.texts = tree, texts

    def module(self, name: str) -> ModuleSource | None:
        if name not in self.texts:
            return self.tree.module(name)
        text = self.texts[name]
        return None if text is None else ModuleSource(name, f"{name}.py", text)


@pytest.fixture(scope="module")
def newest(wheel: Wheel) -> ParsedOnce:
    """The newest release."""
    return parsed_once(wheel("megatron-core", "0.19.2"))


def text_of(tree: SourceTree, module: str = MAMBA.module) -> str:
    source = tree.module(module)
    assert source is not None
    return source.text


def examine(tree: SourceTree, text: str | None, module: str = MAMBA.module) -> Finding:
    return probing.examine(PARTS[0], Edited(tree, {module: text}))


def edited(text: str, old: str, new: str, count: int = 1) -> str:
    assert old in text
    return text.replace(old, new, count)


def marked(text: str, *names: str, how: str = "mark_keep_in_fp32(self.{name})") -> str:
    """Let the constructor mark parameters right before it hands them to context parallelism."""
    lines = "".join(f"        {how.format(name=name)}\n" for name in names)
    return edited(text, "        self.cp = MambaContextParallel(", f"{lines}        self.cp = MambaContextParallel(")


def test_given_trees_that_honour_marks_are_recognised(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        tree = DirectoryTree(path)
        source = tree.module("megatron.core.transformer.module")
        if source is None or "keep_in_fp32" not in source.text:
            continue
        for part in PARTS:
            assert probing.examine(part, tree).verdict in {Verdict.BROKEN, Verdict.FIXED, Verdict.ABSENT}, path


def test_a_tree_without_the_mixer_is_absent(newest: ParsedOnce) -> None:
    assert examine(newest, None).verdict is Verdict.ABSENT
    assert examine(newest, "class Other: pass").verdict is Verdict.ABSENT


@pytest.mark.parametrize(
    "text",
    [
        "from elsewhere import MambaMixer",
        "class MambaMixer: pass",
        "class MambaMixer:\n    def __init__(self): pass",
        "@patched\nclass MambaMixer:\n    def __init__(self): pass",
        "class MambaMixer(",
    ],
)
def test_a_mixer_that_is_made_in_another_way_is_not_recognised(newest: ParsedOnce, text: str) -> None:
    assert examine(newest, text).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize("names", [("A_log",), ("D",), ("A_log", "D")], ids="-".join)
@pytest.mark.parametrize("how", ["mark_keep_in_fp32(self.{name})", "self.{name}.keep_in_fp32 = True"])
def test_a_mixer_that_marks_by_itself_was_not_read(newest: ParsedOnce, how: str, names: tuple[str, ...]) -> None:
    text = marked(text_of(newest), *names, how=how)

    assert examine(newest, text).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    "how",
    [
        "if self.rmsnorm: mark_keep_in_fp32(self.{name})",
        "for _ in (): self.{name}.keep_in_fp32 = True",
        "self.{name}.keep_in_fp32 = False",
        "self.{name}.keep_in_fp32 = self.config.bf16",
        "setattr(self.{name}, 'keep_in_fp32', True)",
        "keep(self.{name})",
        "self.{name}.data = self.{name}.data.bfloat16()",
        "self.{name} = None",
        "self.register_parameter('{name}', other)",
        "del self.{name}",
        "setattr(self, '{name}', other)",
    ],
)
@pytest.mark.parametrize("name", ["A_log", "D"])
def test_anything_else_that_is_done_with_a_parameter_is_not_recognised(newest: ParsedOnce, name: str, how: str) -> None:
    assert examine(newest, marked(text_of(newest), name, how=how)).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dtype=torch.float32, device=torch.cuda.current_device()\n            )", "dtype=config.params_dtype)"),
        ("A_log = torch.log(A)", "A_log = torch.log(A).to(config.params_dtype)"),
        ("A_log = torch.log(A)", "A = A.half()\n            A_log = torch.log(A)"),
        ("A_log = torch.log(A)", "A, B = A.half(), 1\n            A_log = torch.log(A)"),
        ("A_log = torch.log(A)", "A_log: torch.Tensor = torch.log(A)"),
        ("self.A_log = nn.Parameter(A_log)", "self.A_log = nn.Parameter(A_log.bfloat16())"),
        ("self.A_log = nn.Parameter(A_log)", "if True:\n                self.A_log = nn.Parameter(A_log)"),
        ("self.A_log = nn.Parameter(A_log)", "pass"),
        ("self.D = nn.Parameter(", "self.D = nn.Parameter(torch.ones(4)) if self.rmsnorm else nn.Parameter("),
    ],
)
def test_parameters_that_are_created_in_another_way_are_not_recognised(newest: ParsedOnce, old: str, new: str) -> None:
    assert examine(newest, edited(text_of(newest), old, new)).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("-torch.exp(self.cp.get_A_log().float())", "-torch.exp(self.cp.get_A_log())"),
        ("-torch.exp(self.A_log.float())", "-torch.exp(self.A_log)"),
        ("rearrange(self.D.to(dtype)", "rearrange(self.D"),
        ("else self.cp.get_D()", "else self.cp.get_D().to(x.dtype)"),
        ("y = mamba_split_conv1d_scan_combined(", "y = another_kernel("),
        ('D = repeat(self.D, "h -> h p"', 'D = repeat(getattr(self, "D"), "h -> h p"'),
    ],
)
def test_a_place_that_reads_a_parameter_in_another_way_is_not_recognised(
    newest: ParsedOnce, old: str, new: str
) -> None:
    assert examine(newest, edited(text_of(newest), old, new)).verdict is Verdict.UNRECOGNISED


@pytest.mark.full
@pytest.mark.unmeasured
def test_no_mention_of_a_parameter_may_be_doubled_with_a_change(newest: ParsedOnce) -> None:
    text = text_of(newest)
    syntax = ast.parse(text)
    places = [
        node
        for node in ast.walk(syntax)
        if isinstance(node, ast.Attribute) and node.attr in {"A_log", "D", "get_A_log", "get_D"}
    ]
    assert len(places) > 12
    for node in places:
        before, node.value = node.value, ast.Name("other", ast.Load())
        finding = examine(newest, ast.unparse(ast.fix_missing_locations(syntax)))
        node.value = before
        assert finding.verdict is Verdict.UNRECOGNISED, ast.unparse(node)


def test_comments_layout_and_other_methods_of_the_mixer_do_not_matter(newest: ParsedOnce) -> None:
    text = edited(text_of(newest), "    def forward(\n", "    def rows(self):\n        return 1\n\n    def forward(\n")
    finding = examine(newest, ast.unparse(ast.parse(text)))

    assert (finding.verdict, finding.shape) == (Verdict.BROKEN, UNMARKED)


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.A_log_cp1 = A_log_cp1", "self.A_log_cp1 = A_log_cp1.bfloat16()"),
        ("self._slice_vector_param(self.A_log_cp1)", "self._slice_vector_param(self.A_log_cp1).bfloat16()"),
        ("def _slice_vector_param(", "def _slice_some_param("),
        ("class MambaContextParallel", "class AnotherContextParallel"),
        ("return param[start:end]", "return param[start:end].clone()"),
    ],
)
def test_context_parallelism_that_holds_them_in_another_way_is_not_recognised(
    newest: ParsedOnce, old: str, new: str
) -> None:
    text = edited(text_of(newest, PARALLEL), old, new)

    assert examine(newest, text, PARALLEL).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize("text", [None, "class Float16Module: pass"])
def test_where_nothing_is_known_to_honour_marks_none_are_set(newest: ParsedOnce, text: str | None) -> None:
    finding = examine(newest, text, "megatron.core.transformer.module")

    assert finding.verdict is Verdict.UNRECOGNISED
    assert "honour the marks" in finding.summary()


# The gated delta product, which no release has: a mixer of our own with what matters of main's.

PRODUCT = """
class GatedDeltaProductMixer(MegatronModule):
    def __init__(self, config):
        with tracker():
            A = torch.empty(
                self.nheads_local_tp, dtype=torch.float32, device=torch.cuda.current_device()
            ).uniform_(*A_init_range)
            A_log = torch.log(A)
            self.A_log = nn.Parameter(A_log)
            self.A_log._no_weight_decay = True
        self.D = None
        self.cp = GDPContextParallel(A_log_cp1=self.A_log, D_cp1=self.D)
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.D = None", "self.D = nn.Parameter(torch.ones(4))"),
        ("self.D = None", "self.D = None\n        self.A_log.keep_in_fp32 = self.D"),
        ("GDPContextParallel(", "Other("),
        ("", ""),
    ],
)
def test_a_gated_delta_product_needs_the_slices_that_are_known(newest: ParsedOnce, old: str, new: str) -> None:
    texts = {GATED_DELTA_PRODUCT.module: edited(PRODUCT, old, new)}

    assert probing.examine(PARTS[1], Edited(newest, texts)).verdict is Verdict.UNRECOGNISED


def test_both_parts_are_one_overlay_that_is_off_by_default() -> None:
    assert [part.target for part in PARTS] == [MAMBA, GATED_DELTA_PRODUCT]
    assert {part.id for part in PARTS} == {"float16-mixer-parameters"}
    assert all(part.opt_in for part in PARTS)
