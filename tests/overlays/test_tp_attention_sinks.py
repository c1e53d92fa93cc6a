"""A real attention on tensor parallel ranks with the overlay: the norm that gradients are clipped by has the sinks of all ranks.

The cases of pack 37 run on releases, in a process of its own for each, and fork ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from placed_seams import assert_witness_and_self_test, placed, without_overlays
from releases import newest
from reproduced_pack import assert_repaired, measured_on

from megacpp_overlays.feature_probes.tp_attention_sinks import NOT_MARKED
from megacpp_overlays.model import Overlay
from megacpp_overlays.overlays.tp_attention_sinks import LATENT, OVERLAY, PARTS

pytestmark = pytest.mark.upstream

measured = measured_on("37", "0.15.0", "0.16.1", "0.17.1", "0.18.2", newest())


def test_a_release_is_broken_without_the_overlay_and_right_with_it(measured: Any) -> None:
    assert_repaired(measured, parts=2)


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
    assert_witness_and_self_test(part, module, NOT_MARKED)
    with placed(part, NOT_MARKED, module), torch.device("meta"):
        assert not part.self_test(module).broken


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


def test_marks_that_were_set_already_are_kept() -> None:
    replacement, *_ = OVERLAY.replacements[NOT_MARKED]
    sinks: Any = torch.nn.Parameter(torch.zeros(2))
    sinks.tensor_model_parallel = False
    attention = SimpleNamespace(core_attention=SimpleNamespace(softmax_offset=sinks))

    replacement.make(lambda _: None, ModuleType("any"))(attention)

    assert vars(sinks) == {"tensor_model_parallel": False}


def test_a_core_without_sinks_is_left_alone() -> None:
    replacement, *_ = OVERLAY.replacements[NOT_MARKED]

    replacement.make(lambda _: None, ModuleType("any"))(SimpleNamespace(core_attention=SimpleNamespace()))
