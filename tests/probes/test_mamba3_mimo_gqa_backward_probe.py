"""The probe of the MIMO backward: the groups into which it sums gradients, from texts that were read and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mamba3_release import unpack
from probing import ask

from megacpp_overlays.feature_probes import mamba3_mimo_gqa_backward as feature
from megacpp_overlays.model import Finding, Overlay, Verdict
from megacpp_overlays.overlays.mamba3_mimo_gqa_backward import PARTS
from megacpp_overlays.source.file_trees import DirectoryTree
from megacpp_overlays.source.trees import ModuleSource
from megacpp_overlays.upkeep.ledger import due


class Texts:
    """A tree of nothing but these modules, by full name."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts

    def module(self, name: str) -> ModuleSource | None:
        return ModuleSource(name, f"{name}.py", self._texts[name]) if name in self._texts else None


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> DirectoryTree:
    return DirectoryTree(unpack(tmp_path_factory.mktemp("release")))


@pytest.fixture(params=PARTS, ids=["plain", "varlen"])
def part(request: pytest.FixtureRequest) -> Overlay:
    found: Overlay = request.param
    return found


def text_of(tree: DirectoryTree, part: Overlay) -> str:
    source = tree.module(part.target.module)
    assert source is not None
    return source.text


def after(tree: DirectoryTree, part: Overlay, old: str, new: str) -> Finding:
    """Return the finding after the first place with a text was changed."""
    text = text_of(tree, part)
    assert old in text
    return ask(part.probe, Texts({part.target.module: text.replace(old, new, 1)}))


# The release


def test_the_release_is_broken(release: DirectoryTree, part: Overlay) -> None:
    finding = ask(part.probe, release)

    assert (finding.verdict, finding.shape) == (Verdict.BROKEN, feature.ONE_OR_ALL)
    assert "sums gradients into one group or into all, else raises (mamba3_mimo_bwd" in finding.summary()
    assert due([part], release) == []


def test_the_evidence_is_where_it_raises(release: DirectoryTree, part: Overlay) -> None:
    (seen,) = ask(part.probe, release).evidence
    assert seen.line is not None

    assert "G value of {G}" in text_of(release, part).splitlines()[seen.line - 1]


def test_comments_and_docstrings_may_change(release: DirectoryTree, part: Overlay) -> None:
    assert after(release, part, "Copyright (c) 2026", "# Written in 2026").verdict is Verdict.BROKEN
    assert after(release, part, "import torch\n", "import torch  # first\n").verdict is Verdict.BROKEN


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("i_h_qk = i_h // (H // G)", "i_h_qk = i_h % G"),
        ("DQ: T.Tensor([B, S*R, H, N], dtype)", "DQ: T.Tensor([B, S*R, G, N], dtype)"),
        ("elif G == H:", "elif G != 1:"),
        ("TL_DISABLE_TMA_LOWER: True", "TL_DISABLE_TMA_LOWER: False"),
        ("bb_num_stages=0,\n", "bb_num_stages=0,\n        out_norm=None,\n"),
        (".sum(dim=(0, 1)).permute((1, 0, 2))", ".sum(dim=(0, 1))"),
    ],
    ids=["other groups", "grouped gradients", "other cases", "other compilation", "another argument", "other biases"],
)
def test_nothing_in_it_may_change(release: DirectoryTree, part: Overlay, old: str, new: str) -> None:
    old = old if old in text_of(release, part) else old.replace("S*R", "S * R")

    assert after(release, part, old, new).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    "tail",
    [
        "{symbol} = faster({symbol})",
        "mamba_mimo_bwd_bwd = faster(mamba_mimo_bwd_bwd)",
        "from elsewhere import {symbol}",
        "def {symbol}(*args): ...",
        "print('loaded')",
    ],
)
def test_nothing_may_be_added_to_it(release: DirectoryTree, part: Overlay, tail: str) -> None:
    text = f"{text_of(release, part)}\n\n{tail.format(symbol=part.target.symbol)}\n"

    assert ask(part.probe, Texts({part.target.module: text})).verdict is Verdict.UNRECOGNISED


@pytest.mark.full
def test_no_statement_of_the_host_function_may_be_missing(
    release: DirectoryTree, part: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    syntax = ast.parse(text_of(release, part))
    (host,) = (node for node in syntax.body if getattr(node, "name", None) == part.target.symbol)
    assert isinstance(host, ast.FunctionDef)
    statements = [each for each in host.body if not isinstance(each, ast.Expr) or isinstance(each.value, ast.Call)]
    # Without the kernels, which take a second to read.
    monkeypatch.setitem(feature._KNOWN, part.target, feature._text(ModuleSource("host", "host.py", ast.unparse(host))))
    assert ask(part.probe, Texts({part.target.module: ast.unparse(host)})).verdict is Verdict.BROKEN

    whole = host.body
    for left_out in statements:
        host.body = [each for each in whole if each is not left_out]
        seen = ask(part.probe, Texts({part.target.module: ast.unparse(host)}))
        assert seen.verdict is Verdict.UNRECOGNISED, ast.unparse(left_out)
    assert len(statements) > 25


def test_before_mimo_there_is_nothing_to_repair(part: Overlay) -> None:
    assert ask(part.probe, Texts({})).verdict is Verdict.ABSENT


def test_a_backward_without_the_function_is_not_called_absent(part: Overlay) -> None:
    finding = ask(part.probe, Texts({part.target.module: "def other(): ..."}))

    assert finding.verdict is Verdict.UNRECOGNISED
    assert f"there is a MIMO backward but no {part.target.symbol}" in finding.summary()


def test_text_that_does_not_parse_is_not_recognised(part: Overlay) -> None:
    assert ask(part.probe, Texts({part.target.module: "def ("})).verdict is Verdict.UNRECOGNISED


# Main: the parts of its text that the probe reads, in our words

REDUCER = "def reduce_grouped_qk_grads_and_bias_triton(dq, dk, num_groups): ..."
KERNELS = "".join(
    f"@jit\ndef {name}(H, G):\n    def kernel():\n        i_h_qk = i_h // (H // G)\n    return kernel\n"
    for name in feature.FACTORIES
)
HOST = """
    B, S, R, G, N = q.shape
    launch(dq_raw, dk_raw)
    dq, dk, dqb, dkb = reduce_grouped_qk_grads_and_bias_triton(dq_raw, dk_raw, G)
    return (dq, dk, dv, ddA, ddt, dtrap, dqb, dkb, dmimo_v)
"""
IMPORT = f"from {feature.REDUCER} import reduce_grouped_qk_grads_and_bias_triton\n"


def on_main(part: Overlay, text: str | None = None, *, reducer: str | None = REDUCER) -> Finding:
    text = text or repaired(part)
    return ask(part.probe, Texts({part.target.module: text, **({feature.REDUCER: reducer} if reducer else {})}))


def repaired(part: Overlay) -> str:
    return f"{IMPORT}{KERNELS}def {part.target.symbol}(q):{HOST}"


def test_a_reducer_for_any_number_of_groups_looks_like_the_repair(part: Overlay) -> None:
    finding = on_main(part)

    assert finding.looks_repaired, finding.summary()
    assert f"{feature.REDUCER}:" in finding.summary()
    assert due([part], Texts({part.target.module: repaired(part), feature.REDUCER: REDUCER})) == []


def test_a_reducer_that_is_not_there_is_no_repair(part: Overlay) -> None:
    finding = on_main(part, reducer=None)

    assert (finding.verdict, finding.looks_repaired) == (Verdict.UNRECOGNISED, False)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("dk_raw, G)", "dk_raw, 1)", "does not name the four results"),
        ("dk_raw, G)", "dk_raw, H)", "does not name the four results"),
        ("dk_raw, G)", "dk_raw, num_qk_groups=G)", "does not name the four results"),
        ("dq, dk, dqb, dkb = reduce", "dq, dk, *_ = reduce", "does not name the four results"),
        ("    dq, dk, dqb", "    if wide: dq, dk, dqb", "does not name the four results"),
        (
            "launch(dq_raw, dk_raw)",
            "reduce_grouped_qk_grads_and_bias_triton(dq_raw, dk_raw, G)",
            "does not name the four",
        ),
        ("return (dq, dk,", "return (dk, dq,", "does not return what was reduced"),
        ("dqb, dkb, dmimo_v)", "dkb, dqb, dmimo_v)", "does not return what was reduced"),
        ("    return (dq,", "    return result\n    return (dq,", "does not return what was reduced"),
        ("launch(", "G = 1\n    launch(", "does not take G from q alone"),
        ("B, S, R, G, N = q.shape", "B, S, R, G, N = v.shape", "does not take G from q alone"),
        ("launch(", "if G not in (1, H): raise ValueError\n    launch(", "compares G with something"),
        ("i_h // (H // G)", "i_h % G", "do not map heads to groups"),
        ("def mamba_mimo_bwd_bwd(", "def another(", "do not map heads to groups"),
        (IMPORT, "", "does not take reduce"),
        (f"from {feature.REDUCER}", "from elsewhere", "does not take reduce"),
        (IMPORT, IMPORT.replace("import ", "import other as "), "does not take reduce"),
        (IMPORT, f"{IMPORT}reduce_grouped_qk_grads_and_bias_triton = tuned\n", "does not take reduce"),
        (IMPORT, f"{IMPORT}def reduce_grouped_qk_grads_and_bias_triton(): ...\n", "does not take reduce"),
    ],
)
def test_what_only_looks_repaired_is_not_called_fixed(part: Overlay, old: str, new: str, says: str) -> None:
    text = repaired(part)
    assert old in text

    finding = on_main(part, text.replace(old, new, 1))

    assert (finding.verdict, finding.looks_repaired) == (Verdict.UNRECOGNISED, False)
    assert says in finding.summary()


def test_given_trees_of_mamba_are_recognised(part: Overlay, upstream_trees: list[Path]) -> None:
    """Main, for one, is FIXED since 2026-06-08; run with --upstream-tree and a checkout of state-spaces/mamba."""
    for folder in upstream_trees:
        finding = ask(part.probe, DirectoryTree(folder))
        assert finding.verdict is not Verdict.UNRECOGNISED, finding.summary()


@pytest.mark.parametrize("line", ["import {name}", "from {name} import *"])
def test_the_package_has_no_other_way_to_the_function(release: DirectoryTree, line: str) -> None:
    """Both names are bound by `from ... import` in one module each, which the loader leads to the seam."""
    root: Path = release.root
    for part in PARTS:
        assert not any(line.format(name=part.target.module) in path.read_text() for path in root.rglob("*.py"))
