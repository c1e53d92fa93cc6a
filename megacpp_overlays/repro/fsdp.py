"""Megatron-FSDP on gloo ranks of a CPU: its module, a training step next to the same model without it, and a comparison of both."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro.case import TargetAbsent

_PACKAGE = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_TOKENS = 3
"""Tokens of one microbatch."""


def fully_shard_module() -> Any:
    """Import and return the module that shards models and optimizers.

    Raises:
        TargetAbsent: this release has no Megatron-FSDP.
    """
    try:
        return importlib.import_module(f"{_PACKAGE}.fully_shard")
    except ModuleNotFoundError as error:
        if not _PACKAGE.startswith(str(error.name)):
            raise
        raise TargetAbsent("there is no Megatron-FSDP") from error


def fsdp_on_cpu() -> None:
    """Let Megatron-FSDP use the CPU as its GPU in this process, which is a fork: streams do nothing, and tensors stay where they are."""
    import torch

    class CompletedStream:
        """A stream or an event whose methods do nothing, because all work is done already."""

        def __getattr__(self, _name: str) -> Any:
            return lambda *_, **__: CompletedStream()

    class TorchOnCpu:
        """torch with one device."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def device(self, *_: Any) -> Any:
            return torch.device("cpu")

    for name in ("Stream", "Event", "current_stream", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *_, **__: CompletedStream())
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.cuda.current_device = lambda: 0
    torch.Tensor.cuda = lambda self, *_, **__: self
    vars(importlib.import_module(f"{_PACKAGE}.megatron_fsdp"))["torch"] = TorchOnCpu()
    gc.freeze()  # Megatron-FSDP collects garbage often, which would go through all objects that the fork has inherited


def meshes_on_cpu(module: Any) -> None:
    """Put the device meshes that a module makes from process groups on the CPU, in this process, which is a fork."""
    from torch.distributed import DeviceMesh

    class MeshOnCpu(DeviceMesh):  # type: ignore[misc] # torch is not seen by the type checker
        """A mesh of the CPU, for any device that is named."""

        @staticmethod
        def from_group(group: Any, device_type: str, **given: Any) -> Any:
            del device_type
            return DeviceMesh.from_group(group, "cpu", **given)

    vars(module)["DeviceMesh"] = MeshOnCpu


def step_beside(model: Any, plain: Any, optimizer: Any, *, rank: int, microbatches: int) -> None:
    """Run microbatches of this rank through a `MegatronFSDP` and through the same model without it, and step the optimizer of the first.

    Gradients of `plain` are the sums over the microbatches of this rank. Both take tokens of as many channels as their last parameter has columns.
    """
    import torch

    generator = torch.Generator().manual_seed(rank)
    last = [*plain.parameters()][-1]
    for number in range(microbatches):
        states = torch.randn(_TOKENS, last.shape[-1], generator=generator).to(last.device)
        model.is_last_microbatch = number == microbatches - 1
        for each in (model, plain):
            each(states).square().mean().backward()
    optimizer.step()


def weights_of_all_ranks(model: Any, *, is_sharded: bool) -> Any:
    """Return all weights of a `MegatronFSDP` in one row, as its optimizer has them.

    Args:
        model: after it was prepared with an optimizer.
        is_sharded: whether ranks hold parts of weights, whole rows in order and not equally many.
    """
    import torch

    model._replace_param_with_distributed_if_needed()  # noqa: SLF001 - optimizers get the parameters that it puts there
    rows = []
    for each in model.parameters():
        row = (each.to_local() if hasattr(each, "to_local") else each).detach().flatten().clone()
        parts: list[Any] = [row]
        if is_sharded:
            parts = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(parts, row)
        rows += [part.to(row.device) for part in parts]
    return torch.cat(rows)


def compared(found: Mapping[str, list[float]], what: str) -> tuple[float, float]:
    """Return the least-squares ratio of the numbers of one name on all ranks to the numbers `right NAME`, and their relative error."""
    import torch

    changed, right = (
        torch.tensor([number for name, numbers in found.items() if name.endswith(f", {each}") for number in numbers])
        for each in (what, f"right {what}")
    )
    return float((changed * right).sum() / right.square().sum()), float((changed - right).norm() / right.norm())
