"""Symptoms: a person's words find the overlay with that defect, and no other words do."""

from __future__ import annotations

import json

import pytest
from launchers import environment, launch
from made_up import FIXED_TEXT, Upstream

from megacpp_overlays.errors import RegistryError
from megacpp_overlays.loader import registry
from megacpp_overlays.upkeep import symptoms
from megacpp_overlays.upkeep.symptoms import area, search

OVERLAYS = registry.load()
COMMAND = ("-m", "megacpp_overlays", "symptom")


def ids(query: str) -> list[str]:
    return [each.overlay.id for each in search(query, OVERLAYS)]


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("grad_norm is 0", "liger-flce-none-backward"),
        ("my gradient is zero with Liger", "liger-flce-none-backward"),
        ("loss jumps after resume", "scheduler-restore"),
        ("LR wrong after restarting", "scheduler-restore"),
        ("the loss spikes when we reload a fully_reshardable ckpt", "fully-reshardable-padding"),
        ("one head wrong", "mla-rope-head-blocks"),
        ("segfault with recompute", "residual-norm-recompute-alias"),
        ("Unsupported architecture", "hopper-flce-dispatch"),
        ("Divide by zero in layout inference", "tilelang-zero-extent-iterator"),
        ("forked workers: Cannot re-initialize CUDA", "megatron-cuda-on-import"),
        ("loss too high by log of TP size", "gathered-logits-loss"),
    ],
)
def test_the_words_of_a_person_lead_to_an_overlay(query: str, first: str) -> None:
    assert ids(query)[0] == first


@pytest.mark.parametrize(
    ("query", "among"),
    [
        ("replicas drift", {"mla-rope-key-gradient", "tp-norm-gradients"}),
        ("NaN in one head", {"mla-rope-head-blocks", "mamba2-int32-offsets"}),
        ("step takes 54 GB", {"dsa-indexer-streaming", "dsa-sparse-attention"}),
        ("OOM in sparse attention", {"dsa-indexer-streaming", "dsa-sparse-attention", "sparse-mla-dimensions"}),
        ("loss jumps after resume", {"scheduler-restore", "fully-reshardable-padding", "float16-optimizer-state-ids"}),
        ("cuda graph capture fails", {"dsa-capture-gates", "dsa-branchless-scatter", "gdn-capture-gates"}),
    ],
)
def test_all_that_it_may_be_are_named(query: str, among: set[str]) -> None:
    assert among <= set(ids(query))


@pytest.mark.parametrize("query", ["my cat is hungry", "", "the of and", "kubernetes pod evicted"])
def test_words_of_no_overlay_find_none(query: str) -> None:
    assert ids(query) == []


@pytest.mark.parametrize(
    "overlay", [pytest.param(each, id=each.id) for each in {one.id: one for one in OVERLAYS}.values()]
)
def test_each_symptom_finds_its_own_overlay_first_or_next_to_one_with_the_same_words(overlay: registry.Erratum) -> None:
    assert overlay.symptoms, f"{overlay.id} declares no symptoms"
    for symptom in overlay.symptoms:
        found = search(symptom, OVERLAYS)
        best = [each.overlay.id for each in found if each.score == found[0].score]
        assert overlay.id in best or symptom in found[0].overlay.symptoms, symptom


def test_case_endings_and_spellings_do_not_matter() -> None:
    assert ids("Grad Norm IS Zero") == ids("grad_norm is 0")
    assert ids("loss jumped after resuming")[0] == ids("loss jumps after resume")[0]


def test_a_symptom_that_is_no_text_is_refused(upstream: Upstream) -> None:
    with pytest.raises(RegistryError, match="symptoms 'slow' is no tuple of texts"):
        registry.check([("here", upstream.overlay(symptoms="slow"))])


# --- the command ----------------------------------------------------------------------------------------------


def test_the_answer_has_the_decision_here_and_the_next_step(upstream: Upstream) -> None:
    upstream_overlay = "OVERLAY = Upstream({name!r}, None).overlay(symptoms=('frobnication is doubled',))"
    env = environment(upstream)
    upstream.write(f"from made_up import Upstream\n{upstream_overlay.format(name=upstream.name)}\n", module="plugin")

    broken = launch(*COMMAND, "frobnication", "doubled", env=env)
    upstream.write(FIXED_TEXT)
    fixed = launch(*COMMAND, "frobnication", "--json", env=env)

    assert broken.returncode == 0
    assert "1. double-fix (pack 99)" in broken.stdout
    assert "symptom: frobnication is doubled" in broken.stdout
    assert "broken here, and an armed process repairs it" in " ".join(broken.stdout.split())
    assert broken.stdout.splitlines()[-1] == "next: megacpp-overlays explain double-fix; megacpp-overlays audit --quick"
    assert [(each["id"], each["decision"]) for each in json.loads(fixed.stdout)] == [("double-fix", "retired")]


def test_an_empty_answer_has_an_exit_code_of_its_own(upstream: Upstream) -> None:
    done = launch(*COMMAND, "my", "cat", "is", "hungry", env=environment(upstream))

    assert (done.returncode, done.stdout) == (3, "")
    assert "no overlay has a symptom like 'my cat is hungry'; docs/symptoms.md lists all of them" in done.stderr


# --- the page -------------------------------------------------------------------------------------------------


def test_the_page_has_every_symptom_under_a_heading_with_releases() -> None:
    page = symptoms.page(OVERLAYS, {"scheduler-restore": "megacore 1 to 2"}, "generated")

    for each in OVERLAYS:
        assert f"| [`{each.id}`](../RETIREMENT.md#{each.id}-" in page
    [row] = [line for line in page.splitlines() if line.startswith("| Loss jumps after resume or rollback ")]
    assert "| `grad_norm` is 0 |" in page, "a name of code stays as it is"
    assert row.endswith("[`scheduler-restore`](../RETIREMENT.md#scheduler-restore-pack-48) | megacore 1 to 2 |")
    assert page.index("## Checkpoints and resume") < page.index(row) < page.index("## CUDA graphs")


@pytest.mark.parametrize(
    ("symptom", "heading"),
    [
        ("loss jumps after resume", "Checkpoints and resume"),
        ("grad_norm is too small with CUDA graphs", "CUDA graphs"),
        ("out of memory with long sequences", "Memory and time"),
        ("TypeError in MTP", "Errors and crashes"),
        ("replicas drift apart", "Loss, gradients and weights"),
    ],
)
def test_symptoms_are_listed_by_area(symptom: str, heading: str) -> None:
    assert area(symptom) == heading
