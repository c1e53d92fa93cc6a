"""The probe for index scores over four axes: from bodies that were read and nothing else."""

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
from megacpp_overlays.overlays.dsa_indexer_streaming import OVERLAY
from megacpp_overlays.source.file_trees import DirectoryTree
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.trees import ModuleSource, SourceTree
from megacpp_overlays.upkeep.ledger import due

DSA = feature.TARGET.module
KERNELS = DSA.replace(".dsa", ".dsa_kernels")
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


def only_what_counts(tree: SourceTree) -> str:
    """Return the text of the functions that the probe reads: short, so that many edits are quick."""
    syntax = ast.parse(text_of(tree, DSA))
    kept = []
    for node in syntax.body:
        if isinstance(node, ast.ClassDef) and node.name == "DSAIndexer":
            node.body = [each for each in node.body if getattr(each, "name", "") == feature.SCORES]
            kept += [node] if node.body else []
        elif isinstance(node, ast.FunctionDef) and node.name in {feature.SCORES, feature.BACKWARD}:
            kept.append(node)
    return "\n\n".join(map(ast.unparse, kept))


# Verdicts


def test_the_evidence_names_both_places(newest: ParsedOnce) -> None:
    seen = examine(OVERLAY, newest).summary()

    assert f"{feature.SCORES} builds [queries, batch, heads, keys] in float32 (dsa.py:542)" in seen
    assert f"{feature.BACKWARD} builds [queries, batch, heads, keys] in float32 (dsa.py:842)" in seen


def test_every_tree_is_recognised(tree: Path) -> None:
    finding = examine(OVERLAY, DirectoryTree(tree))

    assert finding.verdict in {Verdict.BROKEN, Verdict.ABSENT}, finding.summary()


@pytest.mark.parametrize("stand_in", STAND_INS.values(), ids=STAND_INS)
def test_a_tree_without_an_indexer_has_nothing_to_repair(stand_in: Path) -> None:
    assert examine(OVERLAY, DirectoryTree(stand_in)).verdict is Verdict.ABSENT


def test_every_broken_shape_has_seams() -> None:
    alone = {shape for shape, _ in feature._BROKEN.values()}
    with_loss = set(feature._LOSSES.values())
    assert alone | with_loss | set(feature.OTHER_TOP_K.values()) == set(OVERLAY.replacements)
    assert set(feature.OTHER_TOP_K) == set(feature._TOP_K) == with_loss
    assert set(feature.WITHOUT_LOSS) == set(feature._LOSSES.values()) == set(feature._HELPERS)
    assert set(feature.WITHOUT_LOSS.values()) <= alone


# What has to stay as it was


@pytest.mark.full
@pytest.mark.unmeasured
def test_no_statement_of_the_scores_or_of_their_backward_may_change(release: ParsedOnce) -> None:
    text, edits = only_what_counts(release), 0
    assert examine(OVERLAY, Texts(dsa=text)).verdict is Verdict.BROKEN

    symbols = [feature.METHOD] if "class DSAIndexer" in text else [feature.SCORES, feature.BACKWARD]
    for symbol in symbols:
        for what, changed in statement_edits(text, symbol):
            finding = examine(OVERLAY, Texts(dsa=changed))
            assert finding.verdict is Verdict.UNRECOGNISED, (symbol, what)
            edits += 1
    assert edits >= (10 if symbols == [feature.METHOD] else 100)


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
    ],
    ids=["another equation", "another dtype", "another gradient", "another order"],
)
def test_the_backward_may_not_change(newest: ParsedOnce, old: str, new: str) -> None:
    assert replaced(newest, old, new, last=True).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\ndef _compute_index_scores(\n", "\n@torch.compile\ndef _compute_index_scores(\n"),
        ("\ndef bwd_fused_indexer_loss_naive(\n", "\n@traced\ndef bwd_fused_indexer_loss_naive(\n"),
        ("\ndef rotate_activation(", "\ndef _compute_index_scores(q, weights, k): ...\n\n\ndef rotate_activation("),
        ("\nclass FusedDSAIndexerLoss(", "\n_compute_index_scores = faster(_compute_index_scores)\n\n\nclass FusedDSAIndexerLoss("),
        (
            "\nclass FusedDSAIndexerLoss(",
            "\nif FAST:\n    from fast import bwd_fused_indexer_loss_naive\n\n\nclass FusedDSAIndexerLoss(",
        ),
        ("\nclass FusedDSAIndexerLoss(", "\ndef swap():\n    global _compute_index_scores\n\n\nclass FusedDSAIndexerLoss("),
        ("    q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, use_relu: bool = True\n", "    q, weights, k, relu=True\n"),
        ("    q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, use_relu: bool = True\n", "    q, k, weights, use_relu=True\n"),
        ("\nclass DSAIndexer(MegatronModule):\n", "\nclass DSAIndexer(MegatronModule):\n    def _compute_index_scores(self, q, weights, k): ...\n\n"),
    ],
    ids=[
        *("decorated scores", "decorated backward", "defined twice", "rebound later", "imported under a condition"),
        *("rebound from a function", "renamed argument", "swapped arguments", "function and method"),
    ],
)  # fmt: skip
def test_names_must_mean_one_plain_definition(newest: ParsedOnce, old: str, new: str) -> None:
    assert replaced(newest, old, new).verdict is Verdict.UNRECOGNISED


def test_comments_and_docstrings_may_change(newest: ParsedOnce) -> None:
    finding = replaced(newest, "Naive implementation of backward pass for indexer loss.", "Slow.")

    assert finding.shape == feature.EXACT_LOSS


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            f"{feature.SCORES}(q, weights, k, use_relu=use_relu)  # [B, Sq, Sk]",
            f"{feature.SCORES}(q, weights, k)",
            "does not compute the scores once",
        ),
        (
            f"{feature.SCORES}(q, weights, k, use_relu=use_relu)  # [B, Sq, Sk]",
            f"{feature.SCORES}(k, weights, q, use_relu=use_relu)",
            "does not compute the scores once",
        ),
        ("grad_q = torch.einsum('sbht,tbd->sbhd'", "grad_q = torch.einsum('sbht,tbd->bshd'", "contracts something else"),
        ("grad_kl_div = grad_loss * loss_coeff", "grad_kl_div = grad_loss * loss_coeff * q.mean()", "uses q before heads come in"),
        ("grad_kl_div = grad_loss * loss_coeff", "k = k * loss_coeff\n    grad_kl_div = grad_loss", "uses k before heads come in"),
        ("grad_weighted_scores * weights.unsqueeze(-1)", "grad_index_scores * weights.unsqueeze(-1)", "does not multiply one gradient"),
        ("(grad_weighted_scores * scores_for_weights)", "(2 * grad_weighted_scores * scores_for_weights)", "does not multiply one"),
        (
            "grad_scores * relu_mask.float()",
            "grad_scores * relu_mask.float() * weights.unsqueeze(-1)",
            "does not multiply one gradient",
        ),
        ("return grad_q.to(q.dtype), grad_weights.to(weights.dtype)", "return grad_q, grad_weights", "returns something else"),
        ("    q,\n    weights,\n    k,\n    query,\n    key,\n    topk_indices,", "    k,\n    weights,\n    q,\n    query,\n    key,\n    topk_indices,", "does not take q, weights, k first"),
    ],
    ids=[
        *("relu not passed on", "swapped", "other contraction", "inputs in the loss", "inputs rebound", "two gradients"),
        *("scaled", "weighted twice", "other results", "other parameters"),
    ],
)  # fmt: skip
def test_a_listed_body_is_refused_if_the_seam_would_misread_it(
    newest: ParsedOnce, monkeypatch: pytest.MonkeyPatch, old: str, new: str, says: str
) -> None:
    text = text_of(newest, DSA)
    assert text.count(old) == 1
    tree = EditedTree(newest, DSA, text.replace(old, new))
    source = tree.module(DSA)
    assert source is not None
    bodies = fingerprint(source.function(feature.SCORES)), fingerprint(source.function(feature.BACKWARD))
    monkeypatch.setattr(feature, "_BROKEN", {bodies: (feature.FOUR_AXIS_OPTIONAL_RELU, "a hasty reader")})

    finding = examine(OVERLAY, tree)

    assert finding.verdict is Verdict.UNRECOGNISED
    assert says in finding.summary()


# The loss, which is replaced only where all of it was read


@pytest.mark.parametrize(
    ("version", "shape"),
    [("0.17.0", feature.SOFTENED_LOSS), ("0.18.2", feature.SOFTENED_LOSS), ("0.19.0", feature.EXACT_LOSS)],
)
def test_a_release_whose_loss_was_read_has_it_replaced(version: str, shape: str, wheel: Wheel) -> None:
    finding = examine(OVERLAY, parsed_once(wheel("megatron-core", version)))

    assert finding.shape == shape
    assert f"{feature.LOSS} builds [batch, attention heads, queries, keys]" in finding.summary()


@pytest.mark.full
@pytest.mark.parametrize("version", ["0.17.0", "0.19.2"])
def test_a_loss_that_was_not_read_is_left_to_upstream(version: str, wheel: Wheel) -> None:
    tree = parsed_once(wheel("megatron-core", version))
    text = text_of(tree, DSA)
    shape = examine(OVERLAY, tree).shape
    assert shape is not None
    loss = ast.get_source_segment(
        text, next(n for n in ast.parse(text).body if getattr(n, "name", None) == feature.LOSS)
    )
    assert loss is not None
    edits = 0
    for what, changed in statement_edits(loss, feature.LOSS):
        finding = examine(OVERLAY, EditedTree(tree, DSA, text.replace(loss, changed)))
        assert finding.shape == feature.WITHOUT_LOSS[shape], what
        assert "the main attention's scores, (batch, attention heads, queries, keys), stay" in finding.summary()
        edits += 1
    assert edits >= 20


@pytest.mark.parametrize("place", feature._EXACT_HELPERS, ids=".".join)
def test_what_the_loss_calls_must_have_been_read(newest: ParsedOnce, place: tuple[str, str]) -> None:
    module, function = place
    text = text_of(newest, module)
    assert text.count(f"def {function}(") == 1

    finding = examine(OVERLAY, EditedTree(newest, module, text.replace(f"def {function}(", f"def {function}_before(")))

    assert finding.shape == feature.FOUR_AXIS_OPTIONAL_RELU
    assert f"{module}.{function}, which it calls, is not known" in finding.summary()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("dsa_masking", "probs.sum(dim=dim, keepdim=True).clamp_min(eps)", "probs.sum(dim=dim, keepdim=True)"),
        ("dsa_masking", "valid_mask = torch.isfinite(score_mask)\n", "valid_mask = score_mask == 0\n"),
        ("dsa_indexer_loss", "kl_terms.sum(dim=-1)", "kl_terms.mean(dim=-1)"),
        ("dsa_layout", "return tensor.unsqueeze(1), True", "return tensor.unsqueeze(0), True"),
    ],
)
def test_another_body_of_what_the_loss_calls_leaves_it_to_upstream(
    newest: ParsedOnce, name: str, old: str, new: str
) -> None:
    module = DSA.replace(".dsa", f".{name}")
    text = text_of(newest, module)
    assert old in text

    finding = examine(OVERLAY, EditedTree(newest, module, text.replace(old, new)))

    assert finding.shape == feature.FOUR_AXIS_OPTIONAL_RELU


# The choice of keys, which is replaced only where the loss is and its own body was read


@pytest.mark.full
@pytest.mark.parametrize("version", ["0.17.0", "0.19.2"])
def test_a_choice_of_keys_that_was_not_read_is_left_to_upstream_and_nothing_else_is(version: str, wheel: Wheel) -> None:
    tree = parsed_once(wheel("megatron-core", version))
    text, shape = text_of(tree, DSA), examine(OVERLAY, tree).shape
    assert shape is not None
    choice = ast.get_source_segment(
        text, next(n for n in ast.parse(text).body if getattr(n, "name", None) == feature.TOP_K)
    )
    assert choice is not None
    edits = 0
    for what, changed in statement_edits(choice, feature.TOP_K):
        finding = examine(OVERLAY, EditedTree(tree, DSA, text.replace(choice, changed)))
        assert finding.shape == feature.OTHER_TOP_K[shape], what
        assert f"{feature.TOP_K} has an unknown body" in finding.summary()
        assert "which keys are chosen is left to upstream" in finding.summary()
        edits += 1
    assert edits >= 5


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "\ndef fused_qk_topk_naive(",
            "\n@torch.compile\ndef fused_qk_topk_naive(",
            "fused_qk_topk_naive is decorated",
        ),
        ("\ndef fused_qk_topk_naive(", "\ndef fused_qk_topk_before(", "there is no fused_qk_topk_naive"),
        (
            "\nclass FusedDSAIndexerLoss(",
            "\nfused_qk_topk_naive = faster(fused_qk_topk_naive)\n\n\nclass FusedDSAIndexerLoss(",
            "is no plain definition",
        ),
        ("topk_scores == float('-inf'), -1", "topk_scores == float('-inf'), 0", "has an unknown body"),
    ],
    ids=["decorated", "gone", "rebound", "another mark"],
)
def test_another_choice_of_keys_is_left_alone(newest: ParsedOnce, old: str, new: str, says: str) -> None:
    finding = replaced(newest, old.replace("'", '"'), new.replace("'", '"'))

    assert finding.shape == feature.OTHER_TOP_K[feature.EXACT_LOSS]
    assert says in finding.summary()


# Gone, moved, repaired


def test_dsa_whose_scores_have_moved_is_not_called_absent(release: ParsedOnce) -> None:
    text = text_of(release, DSA).replace(feature.SCORES, "_index_scores_elsewhere")

    finding = examine(OVERLAY, EditedTree(release, DSA, text))

    assert finding.verdict is Verdict.UNRECOGNISED
    assert f"there is DSA but no {feature.SCORES}" in finding.summary()


def test_a_backward_that_is_gone_is_not_recognised(newest: ParsedOnce) -> None:
    text = text_of(newest, DSA).replace(feature.BACKWARD, "bwd_streaming_indexer_loss")

    assert examine(OVERLAY, EditedTree(newest, DSA, text)).verdict is Verdict.UNRECOGNISED


def test_what_cannot_be_parsed_is_not_recognised() -> None:
    assert examine(OVERLAY, Texts(dsa="def _compute_index_scores(:\n")).verdict is Verdict.UNRECOGNISED


REPAIRED = f"""
def {feature.SCORES}(q, weights, k, use_relu=True):
    return streaming(q, weights, k, use_relu)

def {feature.BACKWARD}(q, weights, k, *args):
    return streaming_gradients(q, weights, k, *args)
"""


def test_what_only_looks_repaired_is_not_called_fixed() -> None:
    assert examine(OVERLAY, Texts(dsa=REPAIRED)).looks_repaired
    assert due([OVERLAY], Texts(dsa=REPAIRED)) == []


def test_no_release_is_due(release: ParsedOnce) -> None:
    assert due([OVERLAY], release) == []


# Backends that go past it


@pytest.mark.parametrize("version", ["0.16.1", "0.18.2", "0.19.0", "0.19.2"])
def test_the_decision_names_the_backends_that_the_tree_has(version: str, wheel: Wheel) -> None:
    seen = examine(OVERLAY, parsed_once(wheel("megatron-core", version))).summary()

    named = "where dsa_kernel_backend is tilelang or cudnn and attention_backend is not unfused" in seen
    assert named is version.startswith("0.19")
    assert ("dsa_kernels.py:21" in seen) is named


class Without:
    """A tree without some modules."""

    def __init__(self, tree: SourceTree, *names: str) -> None:
        self._tree, self._names = tree, names

    def module(self, name: str) -> ModuleSource | None:
        return None if name.rpartition(".")[2] in self._names else self._tree.module(name)


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        (["dsa_tilelang_kernels"], "where dsa_kernel_backend is cudnn and"),
        (["dsa_cudnn_kernels"], "where dsa_kernel_backend is tilelang and"),
        (["dsa_cudnn_kernels", "dsa_tilelang_kernels"], None),
        (["dsa_kernels"], None),
    ],
)
def test_a_backend_that_the_tree_does_not_bring_is_not_named(
    newest: ParsedOnce, missing: list[str], says: str | None
) -> None:
    seen = examine(OVERLAY, Without(newest, *missing)).summary()

    assert says in seen if says else "dsa_kernel_backend" not in seen


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"tilelang": ', '"wafer": ', "where dsa_kernel_backend is wafer or cudnn and"),
        ("_BACKEND_MODULE_NAME_BY_BACKEND = {", "_MODULES = {", "backends are not listed in a way that is known"),
    ],
)
def test_backends_are_read_from_the_tree(newest: ParsedOnce, old: str, new: str, says: str) -> None:
    text = text_of(newest, KERNELS).replace(old, new)

    finding = examine(OVERLAY, EditedTree(newest, KERNELS, text))

    assert finding.verdict is Verdict.BROKEN
    assert says in finding.summary()
