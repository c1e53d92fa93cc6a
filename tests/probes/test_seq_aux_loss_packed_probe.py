"""The probes of layers that count packed samples: evidence, absent targets, and recomputed routers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from edited_code import edited_release
from probing import Texts, ask, parsed_once

from megacpp_overlays.feature_probes.seq_aux_loss_packed import (
    EXPERTS,
    EXPERTS_TARGET,
    IN_THE_SHARD,
    PARAMS,
    ROUTER_TARGET,
    TARGET,
    probe,
    probe_experts,
    probe_router,
)
from megacpp_overlays.model import Finding, Verdict

BROKEN = ("0.19.0", "0.19.2")
PROBES = (probe, probe_router, probe_experts)

Wheel = Callable[[str, str], Path]


def edited(module: str, old: str, new: str) -> list[Finding]:
    """Return the findings of both probes on the newest release with an edit."""
    texts = edited_release(module, old, new)
    return [ask(each, texts) for each in PROBES]


@pytest.mark.parametrize("version", BROKEN)
def test_releases_that_count_in_the_shard_are_broken(version: str, wheel: Wheel) -> None:
    tree = parsed_once(wheel("megatron-core", version))

    for each, target in zip(PROBES, (TARGET, ROUTER_TARGET, EXPERTS_TARGET), strict=True):
        finding = each(tree)
        assert (finding.verdict, finding.shape) == (Verdict.BROKEN, IN_THE_SHARD)
        assert str(finding.evidence[0].file).endswith(target.module.replace(".", "/") + ".py")


@pytest.mark.parametrize("text", [None, "class Other: pass"])
def test_a_missing_target_is_absent(text: str | None) -> None:
    texts = Texts({TARGET.module: text, ROUTER_TARGET.module: text, EXPERTS_TARGET.module: text, PARAMS: text})

    assert {ask(each, texts).verdict for each in PROBES} == {Verdict.ABSENT}


@pytest.mark.parametrize(
    "text", ["class PackedSeqParams:\n    tokens_per_sample: int = None\n", "from vendor import PackedSeqParams\n"]
)
def test_a_row_that_says_it_or_comes_from_elsewhere_is_not_absent(text: str) -> None:
    texts = dict.fromkeys((TARGET.module, ROUTER_TARGET.module), "class Other: pass")

    assert ask(probe, Texts({**texts, PARAMS: text})).verdict is Verdict.UNRECOGNISED


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
def test_the_recomputation_of_a_router_must_be_a_known_one(old: str, new: str) -> None:
    found = edited(EXPERTS_TARGET.module, old, new)

    assert [each.verdict for each in found] == [Verdict.BROKEN, Verdict.BROKEN, Verdict.UNRECOGNISED]
    assert EXPERTS in found[-1].evidence[0].seen or "MoELayer" in found[-1].evidence[0].seen
