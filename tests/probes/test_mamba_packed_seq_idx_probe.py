"""The probe of the documents of a packed row in Megatron's Mamba mixer: releases that were read, and unknown forms."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from probing import ParsedOnce, Texts, ask, parsed_once

from megacpp_overlays.feature_probes.mamba_packed_seq_idx import FROM_CALLER, METHOD, TARGET, probe
from megacpp_overlays.model import Finding, Proof, Verdict
from megacpp_overlays.source.file_trees import DirectoryTree
from megacpp_overlays.source.trees import SourceTree

Wheel = Callable[[str, str], Path]
MIXER = TARGET.module


@pytest.fixture(scope="module")
def newest(wheel: Wheel) -> ParsedOnce:
    return parsed_once(wheel("megatron-core", "0.19.2"))


def text_of(tree: SourceTree, module: str = MIXER) -> str:
    source = tree.module(module)
    assert source is not None
    return source.text


def edited(tree: SourceTree, old: str, new: str, module: str = MIXER) -> Finding:
    text = text_of(tree, module)
    assert text.count(old) >= 1
    return ask(probe, Texts({module: text.replace(old, new, 1)}, tree))


@pytest.mark.parametrize(
    ("release", "verdict"),
    [
        ("0.16.0", Verdict.FIXED),
        ("0.16.1", Verdict.FIXED),
        ("0.17.0", Verdict.BROKEN),
        ("0.19.2", Verdict.BROKEN),
    ],
)
def test_releases_were_read_that_are_right_up_to_0_16(wheel: Wheel, release: str, verdict: Verdict) -> None:
    finding = probe(parsed_once(wheel("megatron-core", release)))

    assert finding.verdict is verdict
    assert finding.shape == (FROM_CALLER if verdict is Verdict.BROKEN else None)
    assert finding.proof is (Proof.READ if verdict is Verdict.FIXED else None)


def test_given_trees_are_recognised(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        tree = DirectoryTree(path)
        if tree.module(MIXER) is not None:
            assert ask(probe, tree).verdict is not Verdict.UNRECOGNISED, path


@pytest.mark.parametrize("text", [None, "class Other:\n    pass\n"])
def test_a_tree_without_the_mixer_is_absent(newest: ParsedOnce, text: str | None) -> None:
    assert ask(probe, Texts({MIXER: text}, newest)).verdict is Verdict.ABSENT


@pytest.mark.parametrize(
    "text",
    [
        "from elsewhere import MambaMixer",
        "from elsewhere import *",
        "class MambaMixer: pass",
        "class MambaMixer:\n    def forward(self, hidden_states, **packed): pass",
        "class MambaMixer:\n    def forward(self, hidden_states, packed_seq_params=None): pass",
        "class MambaMixer(Base):\n    def _ssm_training(self, zxBCdt, packed_seq_params=None): pass",
        "class MambaMixer(",
    ],
)
def test_a_mixer_of_another_form_is_not_recognised(newest: ParsedOnce, text: str) -> None:
    assert ask(probe, Texts({MIXER: text}, newest)).verdict is Verdict.UNRECOGNISED


@pytest.mark.unmeasured
def test_no_statement_of_the_method_may_be_left_out(newest: ParsedOnce) -> None:
    text = text_of(newest)
    source = newest.module(MIXER)
    assert source is not None
    method = source.function(METHOD)
    assert method is not None
    lines = text.splitlines(keepends=True)
    statements = [node for node in ast.walk(method) if isinstance(node, ast.stmt) and node is not method]
    tried = 0
    for node in statements:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        gone = [*lines[: node.lineno - 1], " " * node.col_offset + "pass\n", *lines[node.end_lineno :]]
        assert ask(probe, Texts({MIXER: "".join(gone)}, newest)).verdict is Verdict.UNRECOGNISED, ast.unparse(node)
        tried += 1
    assert tried >= 10


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("zxBCdt = self.cp.pre_conv_ssm(zxBCdt, packed_seq_params)", "zxBCdt = self.cp.pre_conv_ssm(zxBCdt)"),
        ("y = self._ssm_training(zxBCdt, packed_seq_params)", "y = self._ssm_training(zxBCdt[1:], packed_seq_params)"),
        ("y = self._ssm_training(zxBCdt, packed_seq_params)", "y = self._ssm_training(zxBCdt)"),
        (
            "y = self._ssm_training(zxBCdt, packed_seq_params)",
            "zxBCdt = zxBCdt[1:]\n            y = self._ssm_training(zxBCdt, packed_seq_params)",
        ),
        ("        assert ssm_state is None", "        zxBCdt = self.split(zxBCdt)\n            assert ssm_state is None"),
        ("class MambaMixer(MegatronModule):", "class MambaMixer(Packed, MegatronModule):"),
        ("class MambaMixer(MegatronModule):", "@packed\nclass MambaMixer(MegatronModule):"),
        ("    def _ssm_training(", "    @packed\n    def _ssm_training("),
        ("    def _dynamic_inference(", "    forward = packed(forward)\n\n    def _dynamic_inference("),
        ("def _check_mamba_sequence_packing_support(", "MambaMixer._ssm_training = packed\n\n\ndef _check_mamba_sequence_packing_support("),
    ],
)  # fmt: skip
def test_a_mixer_that_hands_on_something_else_is_not_recognised(newest: ParsedOnce, old: str, new: str) -> None:
    assert edited(newest, old, new).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    seq_idx: Tensor = None", "    seq_idx: Tensor = derived()"),
        ("    seq_idx: Tensor = None\n", ""),
        ("    total_tokens: int = None", "    total_tokens: int = 0"),
        ("@dataclass\n", "@dataclass(frozen=True)\n"),
        ("@dataclass\n", "@dataclass\n@derived\n"),
        ("class PackedSeqParams:", "class PackedSeqParams(Base):"),
        ("    def __post_init__(self):", "    def __getattribute__(self, name):\n        pass\n\n    def __post_init__(self):"),
        ("seq_lengths.clamp(min=0)", "seq_lengths.abs()"),
        ("    def __post_init__(self):", "    def __post_init__(self, more=None):"),
        ("from torch import Tensor\n", "from torch import Tensor\nif PACKED:\n    from vendor import PackedSeqParams\n"),
    ],
)  # fmt: skip
def test_parameters_of_another_form_are_not_recognised(newest: ParsedOnce, old: str, new: str) -> None:
    assert edited(newest, old, new, "megatron.core.packed_seq_params").verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (MIXER, "seq_idx = packed_seq_params.seq_idx", "seq_idx = build_packed_seq_idx(packed_seq_params, zxBCdt.shape[1])"),
        (
            MIXER,
            "        if in_inference_mode or not self.use_mem_eff_path:",
            "        packed_seq_params = with_documents(packed_seq_params, zxBCdt)\n\n        if in_inference_mode or not self.use_mem_eff_path:",
        ),
        (
            "megatron.core.packed_seq_params",
            "        if isinstance(cu_seqlens, Tensor) and self.total_tokens is not None:",
            "        if isinstance(cu_seqlens, Tensor):",
        ),
    ],
    ids=["in the method", "before the method", "in the parameters"],
)  # fmt: skip
def test_a_repair_in_any_of_three_places_is_not_installed_on(
    newest: ParsedOnce, module: str, old: str, new: str
) -> None:
    assert edited(newest, old, new, module).verdict is Verdict.UNRECOGNISED


def test_comments_layout_and_more_methods_of_the_mixer_do_not_matter(newest: ParsedOnce) -> None:
    more = text_of(newest).replace(
        "    def forward(\n", "    def documents(self):\n        return 1\n\n    def forward(\n", 1
    )
    texts = {MIXER: more, "megatron.core.packed_seq_params": text_of(newest, "megatron.core.packed_seq_params")}
    plain = {module: ast.unparse(ast.parse(text)) for module, text in texts.items()}

    assert plain[MIXER].count("def documents(") == 1
    assert ask(probe, Texts(plain, newest)).verdict is Verdict.BROKEN


def test_without_the_module_of_the_parameters_nothing_is_recognised(newest: ParsedOnce) -> None:
    assert ask(probe, Texts({"megatron.core.packed_seq_params": None}, newest)).verdict is Verdict.UNRECOGNISED
