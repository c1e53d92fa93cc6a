"""Surroundings of the model in a run: process group, data, and one optimizer for each kind of device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import Float16Module
from tiny_model import masked_mean
from torch import Tensor, nn

VOCABULARY, SEQUENCE, BATCH = 256, 24, 2
_ALPHABET = 16
_NOISE = 0.1
_LEARNING_RATE = 5e-3


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join the ranks that torchrun started, or be the only one; data parallel only."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)  # port 0: whichever is free
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@dataclass(frozen=True)
class Batch:
    """One step's data, each [b, s]: token ids, the ids that follow them, and 1.0 where the loss counts."""

    tokens: Tensor
    labels: Tensor
    mask: Tensor


def batches(seed: int, device: torch.device) -> Iterator[Batch]:
    """Yield endless batches of a chain in which one token mostly decides the next; each rank draws its own.

    A span of each sequence does not count for the loss, as with fill-in-the-middle or packed documents.
    """
    successor = torch.randperm(_ALPHABET, generator=torch.Generator().manual_seed(seed))
    draw = torch.Generator().manual_seed(seed * 1000 + dist.get_rank())
    while True:
        chain = [torch.randint(_ALPHABET, (BATCH,), generator=draw)]
        for _ in range(SEQUENCE):
            noise = torch.randint(_ALPHABET, (BATCH,), generator=draw)
            chain.append(torch.where(torch.rand(BATCH, generator=draw) < _NOISE, noise, successor[chain[-1]]))
        text = torch.stack(chain, dim=1)
        start = torch.randint(SEQUENCE // 2, (BATCH, 1), generator=draw)
        place = torch.arange(SEQUENCE)
        hidden_span = (place >= start) & (place < start + SEQUENCE // 3)
        yield Batch(text[:, :-1].to(device), text[:, 1:].to(device), (~hidden_span).float().to(device))


class Training(Protocol):
    """A model that is ready to train, with the optimizer step."""

    model: nn.Module

    def update(self) -> None:
        """Combine the gradients of all ranks, take one optimizer step, and clear them."""


class TorchTraining:
    """torch's AdamW and a plain all-reduce: Megatron's DDP and optimizer allocate on a GPU."""

    def __init__(self, model: Float16Module) -> None:
        self.model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)

    def update(self) -> None:
        """See `Training`."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        self._optimizer.step()
        self._optimizer.zero_grad()


class MegatronTraining:
    """Megatron's DistributedDataParallel and mixed precision optimizer."""

    def __init__(self, model: Float16Module) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(model.config, ddp, model)
        config = OptimizerConfig(optimizer="adam", lr=_LEARNING_RATE, bf16=True, params_dtype=torch.bfloat16)
        self._optimizer = get_megatron_optimizer(config, [self.model])
        self._clear()

    def update(self) -> None:
        """See `Training`."""
        self.model.finish_grad_sync()
        self._optimizer.step()
        self._clear()

    def _clear(self) -> None:
        self.model.zero_grad_buffer()
        self._optimizer.zero_grad()


def step_losses(training: Training, data: Iterator[Batch], steps: int) -> Iterator[float]:
    """Yield the loss of each step: the mean over the tokens that count, on all ranks."""
    for _ in range(steps):
        batch = next(data)
        counted = batch.mask.sum()
        dist.all_reduce(counted)
        # Gradients are averaged over ranks, so each rank divides by its share of all tokens that count.
        share = counted / dist.get_world_size()
        loss = masked_mean(training.model(batch.tokens, batch.labels), batch.mask, counted=share)
        loss.backward()
        training.update()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        yield mean.item() / dist.get_world_size()
