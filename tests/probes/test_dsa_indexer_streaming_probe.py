"""The probe for index scores over four axes: recorded forms and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from dsa_source import EditedTree, statement_edits, text_of
from probing import ParsedOnce, parsed_once
from trees import STAND_INS

from megacpp_overlays.feature_probes import dsa_indexer_streaming as feature
from megacpp_overlays.loader.probing import examine
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.overlays.dsa_indexer_streaming import BACKWARD, LOSS, METHOD, OTHER_TOP_K, OVERLAY, TOP_K
from megacpp_overlays.source import forms
from megacpp_overlays.source.file_trees import DirectoryTree
from megacpp_overlays.source.trees import ModuleSource, SourceTree
from megacpp_overlays.upkeep.ledger import due

DSA = feature.TARGET.module
RECORD = forms.record(OVERLAY.id, DSA)
FIRST = ("0.16.1", "0.17.0", "0.19.2")
"""The first release of each shape that is in the lock, and the last of the newest."""
Wheel = Callable[[str, str], Path]


class Texts:
    """A tree of nothing but these modules."""

    def __init__(self, **texts: str) -> None:
        self._texts = texts

    def module(self, name: str) -> ModuleSource | None:
        last = name.rpartition(".")[2]
        return ModuleSource(name, f"{last}.py", self._texts[last]) if last in self._texts else None


@pytest.fixture(params=FIRST)
def release(request: pytest.FixtureRequest, wheel: Wheel) -> ParsedOnce:
    return parsed_once(wheel("megatron-core", request.param))


@pytest.fixture
def newest(wheel: Wheel) -> ParsedOnce:
    return parsed_once(wheel("megatron-core", "0.19.2"))


def replaced(tree: SourceTree, old: str, new: str, *, last: bool = False) -> Finding:
    """Return the finding after one place of the module was changed: the only one, or the last of several."""
    text = text_of(tree, DSA)
    assert text.count(old) == 1 or (last and old in text), (old, text.count(old))
    before, _, after = text.rpartition(old)
    return examine(OVERLAY, EditedTree(tree, DSA, before + new + after))


def defined(text: str, name: str) -> str:
    """Return the text of a definition of a module, of a class or in one."""
    found = next(each for each in ast.walk(ast.parse(text)) if getattr(each, "name", None) == name)
    segment = ast.get_source_segment(text, found, padded=True)
    assert segment is not None
    return segment


# Verdicts


@pytest.mark.parametrize(
    ("version", "shape", "builds"),
    [
        ("0.16.1", feature.FOUR_AXIS_METHOD, {feature.SCORES}),
        ("0.17.0", feature.SOFTENED_LOSS, {feature.SCORES, BACKWARD, LOSS}),
        ("0.18.2", feature.SOFTENED_LOSS, {feature.SCORES, BACKWARD, LOSS}),
        ("0.19.2", feature.EXACT_LOSS, {feature.SCORES, BACKWARD, LOSS}),
    ],
)
def test_a_release_is_broken_and_the_evidence_names_what_builds(
    version: str, shape: str, builds: set[str], wheel: Wheel
) -> None:
    finding = examine(OVERLAY, parsed_once(wheel("megatron-core", version)))

    assert finding.shape == shape
    seen = [each for each in finding.evidence if " builds [" in each.seen]
    assert {each.seen.partition(" builds [")[0] for each in seen} == builds
    assert all(each.file is not None and each.file.endswith("/dsa.py") and each.line for each in seen)


@pytest.mark.parametrize("version", ["0.16.1", "0.18.2", "0.19.0", "0.19.2"])
def test_the_decision_names_the_backends_that_go_past_it_since_they_are_there(version: str, wheel: Wheel) -> None:
    seen = examine(OVERLAY, parsed_once(wheel("megatron-core", version))).summary()

    assert ("where dsa_kernel_backend is not none" in seen) is version.startswith("0.19")
    assert ("dsa_kernels.py:21" in seen) is version.startswith("0.19")


def test_every_tree_is_recognised(tree: Path) -> None:
    finding = examine(OVERLAY, DirectoryTree(tree))

    assert finding.verdict in {Verdict.BROKEN, Verdict.ABSENT}, finding.summary()


@pytest.mark.parametrize("stand_in", STAND_INS.values(), ids=STAND_INS)
def test_a_tree_without_an_indexer_has_nothing_to_repair(stand_in: Path) -> None:
    assert examine(OVERLAY, DirectoryTree(stand_in)).verdict is Verdict.ABSENT


def test_every_recorded_shape_has_seams_and_so_have_those_that_leave_the_choice_of_keys() -> None:
    shapes = {form.shape for form in RECORD.forms if form.verdict is Verdict.BROKEN}

    assert shapes | set(OTHER_TOP_K.values()) == set(OVERLAY.replacements)
    assert not shapes & set(OTHER_TOP_K.values())


def test_no_release_is_due(release: ParsedOnce) -> None:
    assert due([OVERLAY], release) == []


# What has to stay as it was


@pytest.mark.full
@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("version", "symbol"),
    [
        ("0.16.1", METHOD),
        *((version, symbol) for version in ("0.17.0", "0.19.2") for symbol in (feature.SCORES, BACKWARD, LOSS, TOP_K)),
    ],
)
def test_no_statement_of_what_is_replaced_may_change(version: str, symbol: str, wheel: Wheel) -> None:
    tree, edits = parsed_once(wheel("megatron-core", version)), 0
    text, name = text_of(tree, DSA), symbol.rpartition(".")[2]
    before = defined(text, name)
    assert text.count(before) == 1
    for what, changed in statement_edits(f"class DSAIndexer:\n{before}" if "." in symbol else before, symbol):
        inner = defined(changed, name)
        finding = examine(OVERLAY, EditedTree(tree, DSA, text.replace(before, inner)))
        assert finding.verdict is Verdict.UNRECOGNISED, what
        edits += 1
    assert edits >= 5


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("'sbhd,tbd->sbht', q.float(), k.float()", "'sbhd,tbd->bsht', q.float(), k.float()"),
        ("'sbhd,tbd->sbht', q.float(), k.float()", "'sbhd,tbd->sbht', q, k"),
        ("'sbht,sbhd->tbd', grad_scores", "'sbht,sbhd->tbd', grad_weighted_scores"),
        (
            "return grad_q.to(q.dtype), grad_weights.to(weights.dtype)",
            "return grad_weights.to(q.dtype), grad_q.to(k.dtype)",
        ),
        ('topk_scores == float("-inf"), -1', 'topk_scores == float("-inf"), 0'),
        ("ctx.softmax_scale = softmax_scale", "ctx.softmax_scale = 2 * softmax_scale"),
        ("    return topk_indices, indexer_loss\n", "    return topk_indices, -indexer_loss\n"),
    ],
    ids=[
        *("another equation", "another dtype", "another gradient", "another order", "another mark", "another scale"),
        "another sign",
    ],
)
def test_what_is_replaced_may_not_change(newest: ParsedOnce, old: str, new: str) -> None:
    assert replaced(newest, old, new, last=True).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\ndef _compute_index_scores(\n", "\n@torch.compile\ndef _compute_index_scores(\n"),
        ("\ndef bwd_fused_indexer_loss_naive(\n", "\n@traced\ndef bwd_fused_indexer_loss_naive(\n"),
        ("\ndef fused_qk_topk_naive(", "\n@torch.compile\ndef fused_qk_topk_naive("),
        ("\ndef fused_qk_topk_naive(", "\ndef fused_qk_topk_before("),
        ("\ndef rotate_activation(", "\ndef _compute_index_scores(q, weights, k): ...\n\n\ndef rotate_activation("),
        ("\nclass FusedDSAIndexerLoss(", "\n_compute_index_scores = faster(_compute_index_scores)\n\n\nclass FusedDSAIndexerLoss("),
        (
            "\nclass FusedDSAIndexerLoss(",
            "\nif FAST:\n    from fast import bwd_fused_indexer_loss_naive\n\n\nclass FusedDSAIndexerLoss(",
        ),
        ("\nclass FusedDSAIndexerLoss(", "\ndef swap():\n    global _compute_index_scores\n\n\nclass FusedDSAIndexerLoss("),
        ("\nclass FusedDSAIndexerLoss(", "\nclass AnotherLoss("),
        ("    q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, use_relu: bool = True\n", "    q, weights, k, relu=True\n"),
        ("    q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, use_relu: bool = True\n", "    q, k, weights, use_relu=True\n"),
        ("\nclass DSAIndexer(MegatronModule):\n", "\nclass DSAIndexer(MegatronModule):\n    def _compute_index_scores(self, q, weights, k): ...\n\n"),
    ],
    ids=[
        *("decorated scores", "decorated backward", "decorated choice", "no choice", "defined twice", "rebound later"),
        *("imported under a condition", "rebound from a function", "another loss", "renamed argument"),
        *("swapped arguments", "function and method"),
    ],
)  # fmt: skip
def test_names_must_mean_one_plain_definition(newest: ParsedOnce, old: str, new: str) -> None:
    assert replaced(newest, old, new).verdict is Verdict.UNRECOGNISED


def test_comments_and_docstrings_may_change(newest: ParsedOnce) -> None:
    finding = replaced(newest, "Naive implementation of backward pass for indexer loss.", "Slow.")

    assert finding.shape == feature.EXACT_LOSS


@pytest.mark.parametrize("place", [each for each in RECORD.places if not each.startswith(f"{DSA}:")])
def test_what_the_loss_calls_must_be_there(newest: ParsedOnce, place: str) -> None:
    module, _, function = place.partition(":")
    text = text_of(newest, module)
    assert text.count(f"def {function}(") == 1

    finding = examine(OVERLAY, EditedTree(newest, module, text.replace(f"def {function}(", f"def {function}_before(")))

    assert finding.verdict is Verdict.UNRECOGNISED
    assert place in finding.summary()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("dsa_masking", "probs.sum(dim=dim, keepdim=True).clamp_min(eps)", "probs.sum(dim=dim, keepdim=True)"),
        ("dsa_masking", "valid_mask = torch.isfinite(score_mask)\n", "valid_mask = score_mask == 0\n"),
        ("dsa_indexer_loss", "kl_terms.sum(dim=-1)", "kl_terms.mean(dim=-1)"),
        ("dsa_layout", "return tensor.unsqueeze(1), True", "return tensor.unsqueeze(0), True"),
    ],
)
def test_another_body_of_what_the_loss_calls_is_not_recognised(
    newest: ParsedOnce, name: str, old: str, new: str
) -> None:
    module = DSA.replace(".dsa", f".{name}")
    text = text_of(newest, module)
    assert old in text

    finding = examine(OVERLAY, EditedTree(newest, module, text.replace(old, new)))

    assert finding.verdict is Verdict.UNRECOGNISED


# Gone and moved


def test_dsa_whose_scores_have_moved_is_not_called_absent(release: ParsedOnce) -> None:
    text = text_of(release, DSA).replace(feature.SCORES, "_index_scores_elsewhere")

    assert examine(OVERLAY, EditedTree(release, DSA, text)).verdict is Verdict.UNRECOGNISED


def test_a_backward_that_is_gone_is_not_recognised(newest: ParsedOnce) -> None:
    text = text_of(newest, DSA).replace(BACKWARD, "bwd_streaming_indexer_loss")

    assert examine(OVERLAY, EditedTree(newest, DSA, text)).verdict is Verdict.UNRECOGNISED


def test_what_cannot_be_parsed_is_not_recognised() -> None:
    assert examine(OVERLAY, Texts(dsa="def _compute_index_scores(:\n")).verdict is Verdict.UNRECOGNISED
