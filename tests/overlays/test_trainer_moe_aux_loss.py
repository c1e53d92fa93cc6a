"""The Trainer's balancing loss of experts with the overlay: a mean over microbatches and ranks, where the loss is that of a model of transformers.

The cases and the neighbours of pack 65 run in the lane that has accelerate. The method of the newest release is also asked here about single losses: its module cannot be
imported without accelerate.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from placed_seams import placed
from reproduced_pack import assert_repaired, reproduced_in

from megacpp_overlays.feature_probes.trainer_moe_aux_loss import SUMMED, TARGET
from megacpp_overlays.loader import probing
from megacpp_overlays.model import Verdict
from megacpp_overlays.overlays.trainer_moe_aux_loss import OVERLAY
from megacpp_overlays.source.file_trees import ArchiveTree

pytestmark = pytest.mark.upstream

NEWEST = "5.24.0"
TOKENS, BALANCING, COEFFICIENT = 3.0, 2.0, 0.5
MICROBATCHES, RANKS = 4, 2
UPSTREAM = RANKS * (TOKENS + COEFFICIENT * BALANCING)
RIGHT = RANKS * TOKENS + COEFFICIENT * BALANCING / MICROBATCHES


def test_a_release_is_broken_without_the_overlay_and_right_with_it() -> None:
    assert_repaired(
        reproduced_in(
            "proof", "65", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", MEGACPP_OVERLAY_TRAINER_MOE_AUX_LOSS="on"
        )
    )


@pytest.mark.parametrize("version", ["5.23.0", NEWEST])
def test_releases_are_recognised(wheel: Callable[[str, str], Path], version: str) -> None:
    assert probing.examine(OVERLAY, ArchiveTree(wheel("transformers", version))).verdict is Verdict.BROKEN


# Single losses


class Mixture:
    """A model whose loss has a balancing part."""

    training = True

    def __init__(self, **attributes: Any) -> None:
        vars(self).update({"router_aux_loss_coef": COEFFICIENT} | attributes)

    def __call__(self, **_: Any) -> Any:
        balancing = torch.tensor(BALANCING)
        outputs = {"loss": TOKENS + COEFFICIENT * balancing, "aux_loss": balancing}
        return outputs if getattr(self, "return_dict", True) else tuple(outputs.values())


class OfTransformers(Mixture):
    """A model of transformers whose loss has a balancing part."""


OfTransformers.__module__ = "transformers.models.mixtral.modeling_mixtral"


@pytest.fixture(scope="module")
def stock(wheel: Callable[[str, str], Path]) -> ModuleType:
    """The method of the newest release, in a module of its own."""
    source = ArchiveTree(wheel("transformers", NEWEST)).module(TARGET.module)
    assert source is not None
    (trainer,) = (each for each in source.syntax.body if isinstance(each, ast.ClassDef) and each.name == "Trainer")
    (function,) = (each for each in trainer.body if isinstance(each, ast.FunctionDef) and each.name == "compute_loss")
    names: dict[str, Any] = {
        "logger": logging.getLogger(),
        "deepspeed_sp_compute_loss": lambda *_: torch.tensor(TOKENS),
    }
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, function], []), source.path, "exec"), names)
    found = ModuleType(TARGET.module)
    vars(found)["Trainer"] = type("Trainer", (), {"compute_loss": names["compute_loss"], "get_tp_size": lambda _: 1})
    return found


@pytest.fixture
def loss_of(stock: ModuleType) -> Iterator[Callable[..., Any]]:
    """The loss of a model in a Trainer with these attributes, with the seam."""

    def asked(model: Any, *, counted: Any = 1, return_outputs: bool = False, **attributes: Any) -> Any:
        trainer = vars(stock)["Trainer"]()
        vars(trainer).update(
            accelerator=SimpleNamespace(parallelism_config=None, num_processes=RANKS, unwrap_model=lambda each: each),
            args=SimpleNamespace(average_tokens_across_devices=True, n_gpu=1),
            model=model,
            model_accepts_loss_kwargs=True,
            compute_loss_func=None,
            label_smoother=None,
            current_gradient_accumulation_steps=MICROBATCHES,
        )
        vars(trainer).update(attributes)
        return trainer.compute_loss(model, {}, return_outputs, num_items_in_batch=counted)

    with placed(OVERLAY, SUMMED, stock):
        yield asked


def test_the_self_test_sees_the_defect_and_its_absence(stock: ModuleType) -> None:
    assert OVERLAY.self_test(stock).broken
    with placed(OVERLAY, SUMMED, stock):
        assert not OVERLAY.self_test(stock).broken


TEXT = SimpleNamespace(text_config=SimpleNamespace(router_aux_loss_coef=COEFFICIENT))


def test_a_model_s_balancing_loss_is_its_mean(loss_of: Callable[..., Any]) -> None:
    assert loss_of(OfTransformers()).item() == RIGHT


def test_a_model_in_a_wrapper_of_peft_has_the_weight_of_its_own(loss_of: Callable[..., Any]) -> None:
    adapted = type("Adapted", (Mixture,), {"get_base_model": lambda _: OfTransformers()})()

    assert loss_of(adapted).item() == RIGHT


def test_a_model_of_text_and_images_has_the_weight_in_the_configuration_of_its_text(
    loss_of: Callable[..., Any],
) -> None:
    model = OfTransformers(config=TEXT)
    del model.router_aux_loss_coef

    assert loss_of(model).item() == RIGHT


def test_outputs_are_those_of_the_model(loss_of: Callable[..., Any]) -> None:
    loss, outputs = loss_of(OfTransformers(), return_outputs=True)

    assert (loss.item(), outputs["aux_loss"].item()) == (RIGHT, BALANCING)


def test_a_trainer_that_divides_by_microbatches_itself_gets_the_sum(loss_of: Callable[..., Any]) -> None:
    assert loss_of(OfTransformers(), loss_is_scaled_for_ga=False).item() == RANKS * TOKENS + COEFFICIENT * BALANCING


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Mixture(), id="third-party"),
        pytest.param(OfTransformers(training=False), id="evaluated"),
        pytest.param(OfTransformers(return_dict=False), id="a-tuple"),
        pytest.param(OfTransformers(router_aux_loss_coef=0.0), id="not-balanced"),
    ],
)
def test_losses_of_which_the_balancing_part_is_not_known_are_upstream_s(
    loss_of: Callable[..., Any], model: Any
) -> None:
    assert loss_of(model).item() == UPSTREAM


@pytest.mark.parametrize(
    ("attributes", "loss"),
    [
        ({"model_accepts_loss_kwargs": False}, UPSTREAM / RANKS),
        ({"counted": None}, UPSTREAM / RANKS),
        ({"compute_loss_func": lambda *_, **__: torch.tensor(1.0)}, RANKS),
        ({"args": SimpleNamespace(average_tokens_across_devices=True, n_gpu=RANKS)}, UPSTREAM),
    ],
    ids=["no-count", "not-counted", "of-a-caller", "copies-on-several-gpus"],
)
def test_losses_that_are_no_share_of_a_step_are_upstream_s(
    loss_of: Callable[..., Any], attributes: Any, loss: float
) -> None:
    assert loss_of(OfTransformers(), **attributes).item() == loss


def test_sequence_parallelism_shares_the_loss_out_itself(loss_of: Callable[..., Any]) -> None:
    over_sequences = SimpleNamespace(sp_backend="deepspeed", sp_enabled=True)
    accelerator = SimpleNamespace(parallelism_config=over_sequences, unwrap_model=lambda each: each)

    assert loss_of(OfTransformers(), accelerator=accelerator).item() == TOKENS
