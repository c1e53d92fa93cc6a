"""Real language models on tensor parallel ranks with the overlay: the loss of gathered logits and its gradients are those of one rank.

The measurements are in `reproduce.py` of pack 39, which runs in its own process for each release and forks ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from placed_seams import placed, without_overlays
from places import SUPPORT
from releases import newest, weekly

from megacpp_overlays.feature_probes.gathered_logits_loss import TAKEN_FOR_A_SHARE, TARGET
from megacpp_overlays.overlays.gathered_logits_loss import OVERLAY, observe

pytestmark = pytest.mark.upstream

WITH_HYBRIDS = ("0.18.2", newest())
RELEASES = ("0.14.0", "0.15.0", "0.16.1", "0.17.1", *WITH_HYBRIDS)


@pytest.fixture(scope="module", params=weekly(*RELEASES))
def measured(request: pytest.FixtureRequest, megatron_says: Callable[..., Any]) -> tuple[str, Any]:
    """A release, and its results with the overlay and without it."""
    return request.param, megatron_says(request.param, SUPPORT / "reproduced.py", "39")


def test_models_are_those_that_a_release_has(measured: tuple[str, Any]) -> None:
    version, found = measured

    absent = {name for name, case in found["off"].items() if "absent" in case}
    assert absent == (set() if version in WITH_HYBRIDS else {"hybrid-cpu"})


def test_upstream_s_loss_is_too_large_by_the_logarithm_of_ranks(measured: tuple[str, Any]) -> None:
    _, found = measured

    for case in found["off"].values():
        assert "absent" in case or case["broken"]


def test_losses_and_gradients_are_those_of_one_rank(measured: tuple[str, Any]) -> None:
    _, found = measured
    ((_, decision, reason),) = found["decisions"]

    assert decision == "active", reason
    for case in found["on"].values():
        assert "absent" in case or not case["broken"], case


# In this process


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    """The newest release, without any overlay."""
    with without_overlays(TARGET.module) as found:
        yield found


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(module: ModuleType) -> None:
    assert observe(module).broken
    with placed(OVERLAY, TAKEN_FOR_A_SHARE, module):
        assert not observe(module).broken
        with torch.inference_mode():
            assert not observe(module).broken
    assert observe(module).broken


def given(ranks: int, classes: int, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of so many classes, and the share of them that upstream's method gets on the first of several ranks."""
    (replacement,) = OVERLAY.replacements[TAKEN_FOR_A_SHARE]
    seen: list[torch.Tensor] = []
    method = replacement.make(lambda _, __, logits: seen.append(logits), ModuleType("any"))
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: 0)
    logits = torch.randn(2, 3, classes)
    method(SimpleNamespace(pg_collection=SimpleNamespace(tp=group), **more), torch.zeros(3, 2), logits)
    return logits, seen[0]


def test_a_rank_takes_its_share_of_gathered_logits() -> None:
    logits, found = given(2, 8, vocab_size=8)

    assert torch.equal(found, logits[..., :4])


def test_a_share_may_be_written_to() -> None:
    """Upstream's cross entropy writes to its logits. The gathered logits of the model are unchanged."""
    logits, found = given(2, 8, vocab_size=8)
    before = logits.clone()

    found.zero_()

    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("ranks", "classes", "more"),
    [(2, 4, {"vocab_size": 8}), (1, 8, {"vocab_size": 8}), (2, 8, {})],
    ids=["a share", "one rank", "a model that does not say how many classes it has"],
)
def test_all_else_is_left_alone(ranks: int, classes: int, more: dict[str, int]) -> None:
    logits, found = given(ranks, classes, **more)

    assert found is logits
