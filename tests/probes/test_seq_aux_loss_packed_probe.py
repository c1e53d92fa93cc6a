"""The probe of layers that count packed samples: given trees, and edits of the newest release."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from edited_code import archive, edited_release
from probing import Texts, ask, parsed_once
from releases import only

from megacpp_overlays.feature_probes.seq_aux_loss_packed import (
    EXPERTS,
    EXPERTS_TARGET,
    IN_THE_SHARD,
    LOSS,
    PARAMS,
    ROUTER_TARGET,
    TARGET,
    UNFLATTEN,
    probe,
    probe_experts,
    probe_router,
)
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.source.file_trees import DirectoryTree

BROKEN = ("0.19.0", "0.19.2")
REFLATTEN = "TransformerLayer._maybe_reflatten_from_moe"
UTILS = "megatron.core.transformer.moe.moe_utils"
PROBES = (probe, probe_router, probe_experts)

Wheel = Callable[[str, str], Path]


def edited(module: str, old: str, new: str) -> list[Finding]:
    """Return what both probes say of the newest release with an edit."""
    texts = edited_release(module, old, new)
    return [ask(each, texts) for each in PROBES]


@pytest.mark.parametrize("version", BROKEN)
def test_releases_that_count_in_the_shard_are_broken(version: str, wheel: Wheel) -> None:
    tree = parsed_once(wheel("megatron-core", version))

    for each, target in zip(PROBES, (TARGET, ROUTER_TARGET, EXPERTS_TARGET), strict=True):
        finding = each(tree)
        assert (finding.verdict, finding.shape) == (Verdict.BROKEN, IN_THE_SHARD)
        assert str(finding.evidence[0].file).endswith(target.module.replace(".", "/") + ".py")


def test_given_trees_are_recognised(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        assert {ask(each, DirectoryTree(path)).verdict for each in PROBES} == {Verdict.BROKEN}, path


@pytest.mark.parametrize("text", [None, "class Other: pass"])
def test_what_is_not_there_is_absent(text: str | None) -> None:
    texts = Texts({TARGET.module: text, ROUTER_TARGET.module: text, EXPERTS_TARGET.module: text, PARAMS: text})

    assert {ask(each, texts).verdict for each in PROBES} == {Verdict.ABSENT}


@pytest.mark.parametrize(
    "text", ["class PackedSeqParams:\n    tokens_per_sample: int = None\n", "from vendor import PackedSeqParams\n"]
)
def test_a_row_that_says_it_or_comes_from_elsewhere_is_not_absent(text: str) -> None:
    texts = dict.fromkeys((TARGET.module, ROUTER_TARGET.module), "class Other: pass")

    assert ask(probe, Texts({**texts, PARAMS: text})).verdict is Verdict.UNRECOGNISED


def test_a_layer_without_a_router_is_unrecognised() -> None:
    found = ask(probe, Texts({ROUTER_TARGET.module: None}, archive("megatron_core-0.19.2")))

    assert found.verdict is Verdict.UNRECOGNISED


SYMBOLS = (UNFLATTEN, REFLATTEN, LOSS, "TransformerLayer._forward_mlp", "MoETransformerLayer._forward_mlp")
HOW = ("a parameter more", "decorated", "under a flag", "twice")


@pytest.mark.parametrize(
    ("symbol", "how"),
    only(
        itertools.product(SYMBOLS, HOW),
        zip(SYMBOLS, [*HOW, HOW[0]], strict=True),
    ),
)
def test_every_method_on_the_way_must_be_one_that_was_read(symbol: str, how: str) -> None:
    module = ROUTER_TARGET.module if symbol == LOSS else TARGET.module
    owner, name = symbol.split(".")
    tree = archive("megatron_core-0.19.2")
    source = tree.module(module)
    assert source is not None
    head = f"    def {name}("
    before, cls, after = source.text.partition(f"class {owner}(")
    new = {
        "a parameter more": f"    def {name}(self, more, ",
        "decorated": f"    @other\n{head}",
        "under a flag": f"    if FLAG:\n        def {name}(self): ...\n\n{head}",
        "twice": f"    def {name}(self): ...\n\n{head}",
    }[how]
    assert head in after
    texts = Texts({module: before + cls + after.replace(head, new, 1)}, tree)

    assert {ask(each, texts).verdict for each in PROBES} == {Verdict.UNRECOGNISED}


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (TARGET.module, "class TransformerLayer(", "@other\nclass TransformerLayer("),
        (TARGET.module, "class TransformerLayer(", f"{UNFLATTEN} = other\n\n\nclass TransformerLayer("),
        (
            TARGET.module,
            "        mbs = hidden_states.shape[0] // tokens",
            "        mbs = 1 + hidden_states.shape[0] // tokens",
        ),
        (
            TARGET.module,
            "        if mbs is None:\n            return output\n",
            "        if not mbs:\n            return output\n",
        ),
        (ROUTER_TARGET.module, "class TopKRouter(", "@other\nclass TopKRouter("),
        (ROUTER_TARGET.module, "topk=self.topk * bsz,", "topk=self.topk,"),
        (ROUTER_TARGET.module, "            / bsz\n        )", "            / 1\n        )"),
        (
            ROUTER_TARGET.module,
            "        seq_length, bsz = logits.shape[:2]",
            "        bsz, seq_length = logits.shape[:2]",
        ),
        (
            ROUTER_TARGET.module,
            "    switch_load_balancing_loss_func,\n",
            "    other as switch_load_balancing_loss_func,\n",
        ),
        (
            UTILS,
            "        total_num_tokens = local_num_tokens * reduce_group.size()",
            "        total_num_tokens = local_num_tokens",
        ),
        (
            UTILS,
            "    routing_map: torch.Tensor,\n    reduce_group",
            "    routing_map: torch.Tensor,\n    more,\n    reduce_group",
        ),
    ],
    ids=[
        "another layer",
        "set from outside",
        "another number",
        "another way back",
        "another router",
        "other tokens",
        "no mean",
        "other shapes",
        "another loss",
        "other totals",
        "other counts",
    ],
)
def test_what_was_not_read_is_unrecognised(module: str, old: str, new: str) -> None:
    assert {each.verdict for each in edited(module, old, new)} == {Verdict.UNRECOGNISED}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        if self.moe_layer_recompute and self.training:\n", "        if self.moe_layer_recompute:\n"),
        ("self.route(hidden_states, padding_mask)", "self.router(hidden_states, padding_mask)"),
        ("apply_module(self.router)(hidden_states, padding_mask)", "apply_module(self.router)(hidden_states)"),
        ('    @maybe_skip_or_early_return_by_cudagraph("route")\n', ""),
        ("class MoELayer(", "@other\nclass MoELayer("),
    ],
    ids=["another recomputation", "another call", "another mask", "another decorator", "another class"],
)
def test_what_recomputes_a_router_must_be_what_was_read(old: str, new: str) -> None:
    found = edited(EXPERTS_TARGET.module, old, new)

    assert [each.verdict for each in found] == [Verdict.BROKEN, Verdict.BROKEN, Verdict.UNRECOGNISED]
    assert EXPERTS in found[-1].evidence[0].seen or "MoELayer" in found[-1].evidence[0].seen
