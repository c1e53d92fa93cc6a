"""Workload of linear_cross_entropy_step.py: the model that it trains, and the ways to its loss."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timing
import torch
from linear_cross_entropy.truth import error, truth
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

# isort: split
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from tiny_model import CausalAttention, TinyGPT, masked_mean, per_token_loss

from megacpp_overlays.kernels.linear_cross_entropy import linear_cross_entropy
from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory

RATE = 1e-4


@dataclass(frozen=True)
class Size:
    """The model and its data."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int
    vocabulary: int


@dataclass(frozen=True)
class Batch:
    """Token ids, the ids that follow them, and 1.0 where the loss counts; each [b, s]."""

    tokens: Tensor
    labels: Tensor
    mask: Tensor

    @classmethod
    def draw(cls, size: Size, device: torch.device, samples: int) -> Batch:
        """Return random documents; a third of the tokens does not count."""
        draw = torch.Generator(device).manual_seed(samples)
        shape = (samples, size.sequence + 1)
        text = torch.randint(size.vocabulary, shape, generator=draw, device=device)
        counts = torch.rand(text[:, 1:].shape, generator=draw, device=device) > 1 / 3
        return cls(text[:, :-1], text[:, 1:], counts.float())


def losses_by_megatron(model: TinyGPT, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each token, [s, b], as GPTModel forms it: output layer, then vocab_parallel_cross_entropy."""
    logits, _ = model.output_layer(hidden)
    return model.compute_language_model_loss(labels, logits).t()


def losses_by_liger(model: TinyGPT, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each token, [s, b], as the demo forms it."""
    return per_token_loss(hidden, model.output_layer.weight, labels)


def losses_by_kernel(logits: str) -> Callable[[TinyGPT, Tensor, Tensor], Tensor]:
    """Return the way that uses the kernel of this package."""
    memory = Memory(logits=logits)

    def losses(model: TinyGPT, hidden: Tensor, labels: Tensor) -> Tensor:
        target = labels.t().contiguous()
        return linear_cross_entropy(hidden, model.output_layer.weight, target, reduction="none", memory=memory)

    return losses


WAYS: dict[str, Callable[[TinyGPT, Tensor, Tensor], Tensor]] = {
    "Megatron, unfused": losses_by_megatron,
    "Liger, fused": losses_by_liger,
    "kernel, recompute": losses_by_kernel("recompute"),
    "kernel, keep": losses_by_kernel("keep"),
}


class ScaledGPT(TinyGPT):
    """The demo's model, with a choice of how it has its loss."""

    way = staticmethod(losses_by_megatron)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each token, fp32 [s, b]; tokens and labels are [b, s]."""
        return self.way(self, self.hidden_states(tokens), labels)


def build(size: Size, device: torch.device) -> Float16Module:
    """Return the model on the device, inside the real Float16Module.

    All layers are the demo's attention layer, with its own core, torch's scaled_dot_product_attention. Its state space
    layer is a float32 stand-in that is quadratic in the sequence: it would be most of the step, and no library has such a kernel.
    """
    config = TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        bf16=True,
        params_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=device.type == "cpu",
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    torch.manual_seed(0)
    if device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    layer = get_gpt_layer_local_spec()
    layer.submodules.self_attention.submodules.core_attention = CausalAttention
    block = TransformerBlockSubmodules(layer_specs=[layer] * size.layers, layer_norm=WrappedTorchNorm)
    model = ScaledGPT(config, block, size.vocabulary, size.sequence).to(device)
    return Float16Module(config, model)


class Training:
    """A model with its optimizer: torch's AdamW on bf16 parameters, fused into one kernel where there is a GPU."""

    def __init__(self, model: Float16Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self._start_optimizer()

    def _start_optimizer(self) -> None:
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=fused)

    def choose(self, way: str) -> None:
        """Let the model have its loss in this way."""
        self.model.module.way = WAYS[way]

    def stages(self, way: str, batch: Batch) -> timing.Stages:
        """Return forward, backward and update; the last returns the loss."""

        def forward() -> Tensor:
            self.choose(way)
            return masked_mean(self.model(batch.tokens, batch.labels), batch.mask)

        def backward(loss: Tensor) -> Tensor:
            loss.backward()
            return loss.detach()

        def update(loss: Tensor) -> Tensor:
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss

        return forward, backward, update

    def step(self, way: str, batch: Batch) -> Tensor:
        """Take one step and return the loss."""
        result: Any = ()
        for stage in self.stages(way, batch):
            result = (stage(*result),)
        return result[0]

    def trajectory(self, way: str, batch: Batch, steps: int, start: list[Tensor]) -> list[float]:
        """Return the losses of some steps on one batch, from the given parameters."""
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), start, strict=True):
                parameter.copy_(value)
        self._start_optimizer()
        return torch.stack([self.step(way, batch) for _ in range(steps)]).tolist()

    def loss_part(self, way: str, batch: Batch) -> timing.Stages:
        """Return forward and backward of the output layer and the loss alone, on the hidden states of the batch."""
        model = self.model.module
        with torch.no_grad():
            hidden = model.hidden_states(batch.tokens)
        hidden.requires_grad_()
        leaves = [hidden, model.output_layer.weight]
        return (
            lambda: masked_mean(WAYS[way](model, hidden, batch.labels).float(), batch.mask),
            lambda loss: (loss.detach(), *torch.autograd.grad(loss, leaves)),
        )

    def agreement(self, batch: Batch, ways: list[str]) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield the loss of each way on the same parameters, and the errors of its gradients against float64."""
        model = self.model.module
        with torch.no_grad():
            hidden = model.hidden_states(batch.tokens)
        scale = (batch.mask / batch.mask.sum()).t().flatten()
        labels = batch.labels.t().flatten()
        losses, of_hidden, of_weight = truth(hidden.flatten(0, 1), model.output_layer.weight, labels, scale)
        yield "float64", {"loss": (losses * scale).sum().item()}
        for way in ways:
            forward, backward = self.loss_part(way, batch)
            loss, hidden_gradient, weight_gradient = backward(forward())
            errors = {"dX": error(hidden_gradient.flatten(0, 1), of_hidden), "dW": error(weight_gradient, of_weight)}
            yield way, {"loss": loss.item(), **errors}
