"""Tensors that a forward pass saves for its backward pass, where the caller may reuse a buffer in between.

Labels, biases and class weights are small, so they are copied: a batch may be written into a static or prefetch buffer
before the backward pass of the batch ahead of it has run. Hidden states and the weight of the output layer are not
copied. Autograd raises if they were written in place, and does not notice a write through `.data`, as for
`torch.nn.functional.linear`.
"""

from __future__ import annotations

from typing import Any

import torch

_INFERENCE = "megacpp_inference_tensors"
"""Attribute of an autograd context: inference tensors by their place among the saved tensors."""


def private_copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a copy that later writes to the tensor do not reach; None for None."""
    return None if tensor is None else tensor.detach().clone()


def save(ctx: Any, *tensors: torch.Tensor | None) -> None:
    """Save tensors for the backward pass, inference tensors among them.

    `save_for_backward` refuses an inference tensor because it has no version counter. Nothing is differentiated through
    it here, so the context refers to it instead.
    """
    inference = {place: each for place, each in enumerate(tensors) if each is not None and each.is_inference()}
    ctx.save_for_backward(*(None if place in inference else each for place, each in enumerate(tensors)))
    setattr(ctx, _INFERENCE, inference)


def saved(ctx: Any) -> list[Any]:
    """Return the tensors that `save` saved, in their order.

    Raises:
        RuntimeError: a tensor was written in place since, or the graph was freed.
    """
    inference = getattr(ctx, _INFERENCE)
    return [inference.get(place, each) for place, each in enumerate(ctx.saved_tensors)]
