"""Scale of the balancing loss of a mixture of experts over microbatches and ranks in the Trainer of transformers: off unless its variable is `on`.

A model that gets `num_items_in_batch` divides the loss of its tokens by those of all microbatches, and of all ranks with `average_tokens_across_devices`. So the Trainer does not
divide that loss by the number of microbatches, and multiplies it by the ranks over which gradients are averaged. The balancing loss in it is a mean of one microbatch: it is
as many times too large as there are microbatches and ranks.

Upstream's method runs unchanged. The excess of the balancing loss is subtracted from the returned loss. The factor by which the method multiplies is measured by a call with a
model whose loss is one. Evaluation, losses of callers, label smoothing, and models whose balancing loss or coefficient is not known are upstream's.

The overlay is off by default because coefficients were tuned with upstream's scale.

Source: https://github.com/huggingface/transformers/issues/48690
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import trainer_moe_aux_loss as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime.bare_instances import bare
from megacpp_overlays.runtime.gradients import gradients

_COEFFICIENT = "router_aux_loss_coef"


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **more: Any
    ) -> Any:
        def ask(model: Any, inputs: Any, return_outputs: bool = True) -> Any:
            return original(self, model, inputs, return_outputs, num_items_in_batch=num_items_in_batch, **more)

        coefficient = _coefficient(self, model) if num_items_in_batch is not None and _is_of_model(self, model) else 0
        if not coefficient:
            return ask(model, inputs, return_outputs)
        loss, outputs = ask(model, inputs)
        balancing = outputs.get("aux_loss") if isinstance(outputs, Mapping) else None
        if balancing is not None:
            times_too_many = float(ask(_loss_of_one, {})[0]) - 1 / _microbatches(self)
            if times_too_many:
                loss = loss - coefficient * times_too_many * balancing.to(loss.device)
        return (loss, outputs) if return_outputs else loss

    return compute_loss


def _is_of_model(trainer: Any, model: Any) -> bool:
    """Return whether the model itself divides the loss that is learned from by tokens of more than this microbatch."""
    over_sequences = getattr(trainer.accelerator, "parallelism_config", None)
    return (
        model.training
        and trainer.model_accepts_loss_kwargs
        and trainer.compute_loss_func is None
        and trainer.label_smoother is None
        and trainer.args.n_gpu <= 1
        and not getattr(over_sequences, "sp_enabled", False)  # the loss is shared out otherwise
    )


def _coefficient(trainer: Any, model: Any) -> float:
    """Return the weight of the balancing loss in that of a model, as models of transformers have it; 0 where it is not known."""
    whole = trainer.accelerator.unwrap_model(model)
    whole = getattr(whole, "get_base_model", lambda: whole)()  # of PEFT
    if not any(each.__module__.startswith("transformers.models.") for each in type(whole).__mro__):
        return 0.0
    if hasattr(whole, _COEFFICIENT):
        return float(getattr(whole, _COEFFICIENT))
    text = getattr(getattr(whole, "config", None), "text_config", None)
    return float(getattr(text, _COEFFICIENT, 0.0))


def _microbatches(trainer: Any) -> int:
    """Return over how many microbatches gradients add up, 1 where the Trainer divides by their number."""
    if getattr(trainer, "loss_is_scaled_for_ga", None) is False:
        return 1
    return int(trainer.current_gradient_accumulation_steps)


def _loss_of_one(**_: Any) -> dict[str, Any]:
    import torch

    return {"loss": torch.ones((), device="cpu")}


_STEPS = ((1, 1, 1.0), (4, 1, 0.25), (1, 2, 1.0), (4, 2, 0.25))
"""Microbatches, data parallel ranks, and the right gradient of a balancing loss on one of them."""


def observe(module: ModuleType) -> Observation:
    """Ask for the loss of a model over microbatches and ranks, and take its gradients by a loss of tokens and by a balancing loss."""
    seen, broken = [], False
    for microbatches, ranks, right in _STEPS:
        tokens, balancing = _gradients(module, microbatches, ranks)
        broken |= abs(balancing - right) > right / 10 or abs(tokens - ranks) > ranks / 10
        seen.append(f"{microbatches} microbatches on {ranks} ranks {balancing:g}, {right:g} is right")
    return Observation(broken=broken, seen=f"the gradient of a balancing loss is for {'; for '.join(seen)}")


class _Mixture:
    """A model of transformers whose loss is the sum of one of tokens and a balancing one."""

    training = True
    router_aux_loss_coef = 1.0

    def __init__(self, tokens: Any, balancing: Any) -> None:
        self._losses = tokens, balancing

    def __call__(self, **_: Any) -> dict[str, Any]:
        return {"loss": sum(self._losses), "aux_loss": self._losses[1]}


_Mixture.__module__ = "transformers.models.self_test"


def _gradients(module: ModuleType, microbatches: int, ranks: int) -> tuple[float, float]:
    """Return the gradients of the loss of one microbatch by that of its tokens, and by its balancing loss."""
    import torch

    with torch.inference_mode(False), torch.enable_grad():
        losses = [torch.ones((), device="cpu", requires_grad=True) for _ in range(2)]
        trainer = bare(
            module.Trainer,
            accelerator=SimpleNamespace(parallelism_config=None, num_processes=ranks, unwrap_model=lambda model: model),
            args=SimpleNamespace(average_tokens_across_devices=True, n_gpu=1),
            get_tp_size=lambda: 1,
            model_accepts_loss_kwargs=True,
            compute_loss_func=None,
            label_smoother=None,
            current_gradient_accumulation_steps=microbatches,
        )
        loss = trainer.compute_loss(_Mixture(*losses), {}, num_items_in_batch=1)
        of_tokens, of_balancing = (float(each) for each in gradients(loss, *losses))
    return of_tokens, of_balancing


OVERLAY = Overlay(
    id="trainer-moe-aux-loss",
    pack=65,
    title="let the balancing loss of a mixture of experts be a mean over microbatches and ranks in the Trainer of transformers",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.SUMMED: (Replacement(symbol=feature.TARGET.symbol, make=_make),)},
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=True,
    symptoms=(
        "experts balance more strongly with gradient accumulation in the Trainer",
        "aux_loss of Mixtral or Qwen3-MoE grows with gradient_accumulation_steps",
        "the loss of a mixture of experts that the Trainer logs grows with the number of GPUs",
    ),
    concerns="experts",
    breaks="the Trainer's balancing loss of experts is as many times too large as there are microbatches and data parallel ranks",
    retire_when="in the Trainer the weight of aux_loss depends neither on gradient accumulation nor on the number of ranks",
    brief="the Trainer's MoE balancing loss",
    until="it is a mean over microbatches and ranks",
    threads=(
        Thread(repository="huggingface/transformers", number=48690, state="open, opened 2026-09-10: over ranks"),
        Thread(
            repository="huggingface/transformers", number=48691, state="open, opened 2026-09-10: a repair over ranks"
        ),
    ),
    last_validated="2026-11-29, x86-64 without GPU, torch 2.11.0: transformers 5.0.0, 5.12.1, 5.23.0 and 5.24.0; 5.0.0 to 5.24.0 read",
)
