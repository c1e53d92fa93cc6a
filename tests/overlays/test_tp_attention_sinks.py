"""A real attention on tensor parallel ranks with the overlay: the norm that gradients are clipped by has the sinks of all ranks.

What is measured is in `reproduce.py` of pack 37, which runs in a process of its own for each release, and forks ranks.
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

from megacpp_overlays.feature_probes.tp_attention_sinks import NOT_MARKED
from megacpp_overlays.model import Overlay
from megacpp_overlays.overlays.tp_attention_sinks import LATENT, OVERLAY, PARTS

pytestmark = pytest.mark.upstream

RELEASES = ("0.15.0", "0.16.1", "0.17.1", "0.18.2", newest())
CASES = ("norm-cpu", "norm-latent-cpu")


@pytest.fixture(scope="module", params=weekly(*RELEASES))
def measured(request: pytest.FixtureRequest, megatron_says: Callable[..., Any]) -> Any:
    """What a release does with the overlay and without it."""
    return megatron_says(request.param, SUPPORT / "reproduced.py", "37")


@pytest.mark.parametrize("case", CASES)
def test_upstream_s_norm_lacks_sinks_of_the_second_rank(case: str, measured: Any) -> None:
    assert measured["off"][case]["broken"]


@pytest.mark.parametrize("case", CASES)
def test_norms_and_clipped_gradients_are_those_of_one_rank(case: str, measured: Any) -> None:
    assert {decision for _, decision, _ in measured["decisions"]} == {"active"}, measured["decisions"]
    assert not measured["on"][case]["broken"], measured["on"][case]["seen"]


# In this process


@pytest.fixture(scope="module", params=PARTS, ids=["attention", "latent attention"])
def part(request: pytest.FixtureRequest) -> Overlay:
    overlay: Overlay = request.param
    return overlay


@pytest.fixture(scope="module")
def module(part: Overlay) -> Iterator[ModuleType]:
    """The newest release, without any overlay."""
    with without_overlays(part.target.module) as found:
        yield found


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(part: Overlay, module: ModuleType) -> None:
    observe = part.witness
    assert observe is not None
    assert observe is part.self_test
    before = dict(vars(module))
    assert observe(module).broken
    with placed(part, NOT_MARKED, module):
        assert not observe(module).broken
        with torch.device("meta"), torch.inference_mode():
            assert not observe(module).broken
    assert observe(module).broken
    assert vars(module) == before


def test_the_witness_of_latent_attention_needs_no_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.16.1 says that it has Transformer Engine's layers where it has mocks."""
    with without_overlays(LATENT.target.module) as module:
        monkeypatch.setattr(module, "HAVE_TE", True)
        monkeypatch.setattr(module, "TELinear", SimpleNamespace())

        assert LATENT.witness is not None
        assert LATENT.witness(module).broken
        assert isinstance(module.TELinear, SimpleNamespace)


@pytest.mark.parametrize(
    ("sinks", "marks"),
    [
        (
            torch.nn.Parameter(torch.zeros(2)),
            {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1},
        ),
        (torch.zeros(2), {}),
        (None, None),
    ],
    ids=["learnable", "off by one", "vanilla"],
)
def test_a_constructor_gets_its_arguments_and_only_a_parameter_is_marked(sinks: Any, marks: Any) -> None:
    replacement, *_ = OVERLAY.replacements[NOT_MARKED]
    attention, seen = SimpleNamespace(), []

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))
        self.core_attention = SimpleNamespace(softmax_offset=sinks)

    replacement.make(made, ModuleType("any"))(attention, 1, name="name")

    assert seen == [((1,), {"name": "name"})]
    assert (None if sinks is None else vars(sinks)) == marks


def test_marks_that_somebody_set_are_kept() -> None:
    replacement, *_ = OVERLAY.replacements[NOT_MARKED]
    sinks: Any = torch.nn.Parameter(torch.zeros(2))
    sinks.tensor_model_parallel = False
    attention = SimpleNamespace(core_attention=SimpleNamespace(softmax_offset=sinks))

    replacement.make(lambda _: None, ModuleType("any"))(attention)

    assert vars(sinks) == {"tensor_model_parallel": False}


def test_a_core_without_sinks_is_left_alone() -> None:
    replacement, *_ = OVERLAY.replacements[NOT_MARKED]

    replacement.make(lambda _: None, ModuleType("any"))(SimpleNamespace(core_attention=SimpleNamespace()))
