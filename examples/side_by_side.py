"""The two defects, measured on the model of the demo: values lost in bf16, and the error of the gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.transformer.module import Float16Module
from tiny_model import build_config, build_model, masked_mean, per_token_loss
from tiny_training import SEQUENCE, VOCABULARY, Batch
from torch import Tensor
from torch.nn import functional

from megacpp_overlays.fp32_marks import MAMBA3_ALWAYS, MAMBA3_MIMO


@dataclass(frozen=True)
class ExemptParameter:
    """The effect of Float16Module on one parameter that the block needs in fp32."""

    dtype: str
    values: int
    changed: int
    """How many values are no longer the ones that the block was built with."""


@dataclass(frozen=True)
class Measurement:
    """One column of the comparison."""

    exempt: dict[str, ExemptParameter]
    gradient_error: dict[str, float]
    """Largest difference from plain PyTorch in fp32, over its largest value; by the tensor's role."""


def build_wrapped(seed: int, device: torch.device) -> tuple[Float16Module, dict[str, Tensor]]:
    """Return the model inside the real Float16Module, and the exempt parameters as they were before."""
    config = build_config()
    model = build_model(config, vocabulary=VOCABULARY, sequence=SEQUENCE, seed=seed).to(device)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if _is_exempt(name)}
    return Float16Module(config, model), before


def measure(seed: int, batch: Batch) -> Measurement:
    """Build the model and measure both defects with the overlays as they are now."""
    wrapped, before = build_wrapped(seed, batch.tokens.device)
    after = dict(wrapped.module.named_parameters())
    with torch.no_grad():
        hidden = wrapped.module.hidden_states(batch.tokens)
    return Measurement(
        exempt={name: _compare(value, after[name].detach()) for name, value in before.items()},
        gradient_error=gradient_error(hidden.float(), wrapped.module.output_layer.weight.detach().float(), batch),
    )


def gradient_error(hidden: Tensor, weight: Tensor, batch: Batch) -> dict[str, float]:
    """Return the relative error of both gradients of the masked loss: hidden [s, b, d], weight [v, d], fp32."""

    def gradients(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        return torch.autograd.grad(masked_mean(loss(*leaves, batch.labels), batch.mask), leaves)

    pairs = zip(gradients(per_token_loss), gradients(_plain_loss), strict=True)
    errors = [((ours - true).abs().max() / true.abs().max()).item() for ours, true in pairs]
    return dict(zip(("input", "weight"), errors, strict=True))


def _plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = hidden @ weight.t()
    return functional.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="none").view(logits.shape[:2])


def _is_exempt(name: str) -> bool:
    return name.rpartition(".")[2] in MAMBA3_ALWAYS + MAMBA3_MIMO


def _compare(before: Tensor, after: Tensor) -> ExemptParameter:
    return ExemptParameter(
        dtype=str(after.dtype).removeprefix("torch."),
        values=before.numel(),
        changed=int((after.float() != before).sum()),
    )
