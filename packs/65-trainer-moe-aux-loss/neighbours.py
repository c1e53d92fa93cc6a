"""The Trainer of transformers where it is right without the overlay: models without experts or without their balancing loss, one microbatch, losses of callers, evaluation."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside

PACK = beside(__file__)


def _trained(ranks: int = 1, microbatches: int = 2, **asked: Any) -> Mapping[str, object]:
    return {**PACK.over(ranks, microbatches, **asked)}


def _evaluated(**asked: Any) -> Mapping[str, object]:
    """Return the loss of an evaluation, of which each row is a batch."""
    return {"evaluated": PACK.over(1, 2, evaluate=True, **asked)["evaluated"]}


def _with_loss_of_caller(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """Return the loss of a caller that weighs the balancing loss itself."""
    import torch

    logits = outputs.logits[:, :-1].flatten(0, 1)
    return (
        torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch
        + outputs.aux_loss / 2
    )


def _by_subclass(microbatches: int, **asked: Any) -> Any:
    """Return what a Trainer of a user does, whose loss is that of the model by itself."""

    class Own(PACK.library().Trainer):  # type: ignore[misc] # of a module that is found at run time
        """Divides by the number of microbatches, as a Trainer whose loss is a mean."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            found = model(**inputs)
            loss = found.loss / self.args.gradient_accumulation_steps
            return (loss, found) if return_outputs else loss

    return PACK.trained(microbatches, trainer=Own, **asked)


_of = functools.partial(Neighbour, overlay=PACK.OVERLAY)
NEIGHBOURS = (
    _of(name="without-experts", run=functools.partial(_trained, model_kind="Llama")),
    _of(name="without-router-logits", run=functools.partial(_trained, model_output_router_logits=False)),
    _of(name="coefficient-of-zero", run=functools.partial(_trained, model_router_aux_loss_coef=0.0)),
    _of(name="one-microbatch", run=functools.partial(_trained, microbatches=1)),
    _of(name="label-smoothing", run=functools.partial(_trained, label_smoothing_factor=0.1)),
    _of(name="loss-of-a-caller", run=functools.partial(_trained, compute_loss_func=_with_loss_of_caller)),
    _of(name="loss-of-a-subclass", run=functools.partial(_trained, run=_by_subclass)),
    _of(name="evaluated", run=_evaluated),
    _of(
        name="ranks-that-count-for-themselves",
        run=functools.partial(_trained, 2, 1, average_tokens_across_devices=False),
    ),
)
