"""Linear cross entropy without the logits: an output layer and its loss in one step, right for every mask.

With a loss per token the incoming gradient differs from token to token, so it has to be applied to the gradient of
the logits, before the products that sum over tokens. The backward pass does that on logits that it computes again, a
block of classes at a time, or on those of the forward pass, where there is room to keep them. See
`memory` for that choice, and `reference` for the definition of the loss.

CUDA devices compute with cuBLAS and Triton, all others in plain PyTorch. After one look at labels and masks in the first
backward pass (see `memory`, which also says when tokens that do not count are left out) there is no host
synchronisation, so a step can be captured in a CUDA graph, and no atomic addition either, so a step that is repeated
gives the same bits.

Targets, bias and class weights are copied for the backward pass, so their buffers may be written again before it. Hidden
states and the weight are read again: autograd raises if they were written in place in between, and does not notice a write
through `.data`. Inference tensors are taken like any constant.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import distributed
from torch.autograd.function import once_differentiable

from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory, process_wide
from megacpp_overlays.kernels.linear_cross_entropy.parallel import (
    Group,
    Layer,
    Terms,
    as_labels,
    backward_pass,
    forward_pass,
    gather,
    own_class_weight,
)
from megacpp_overlays.kernels.linear_cross_entropy.saved_tensors import private_copy, save, saved
from megacpp_overlays.kernels.linear_cross_entropy.shard import GradientRequest
from megacpp_overlays.kernels.vocabulary_softmax.numbers import Statistics

Reduction = Literal["none", "sum", "mean"]


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
    group: distributed.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    main_grad: torch.Tensor | None = None,
    memory: Memory | None = None,
) -> torch.Tensor:
    """Return `cross_entropy(hidden @ weight.t() + bias, target)`, differentiable once in hidden, weight and bias.

    Logits are rounded to the dtype that the product has here, autocast included, as `torch.nn.functional.linear` rounds
    them; bias, softcap and all that follows are float32 (float64 for float64), and so is the loss.

    Args:
        hidden: (tokens, hidden size) or (sequence, batch, hidden size), floating, any strides.
        weight: (classes, hidden size); in a group this rank's share, where rank r holds classes r * n to (r + 1) * n.
        target: (tokens,) or (sequence, batch), integer; those of all tokens under sequence parallelism.
        bias: (classes,), this rank's share.
        class_weight: weights of all classes, of every rank's. A target that is no class is an error then; without class
            weights its loss is the log-sum-exp.
        reduction: "none" gives a loss for each token; "mean" divides by the number of tokens that are not ignored, or
            by the sum of their class weights, and is NaN without one.
        ignore_index: tokens with this target have loss 0 and give no gradient, whatever their logits are.
        label_smoothing: share of the loss that is spread evenly over all classes, 0 to 1.
        softcap: bound of the logits, `softcap * tanh(logits / softcap)`.
        lse_square_scale: factor of the z-loss, the squared log-sum-exp of the logits.
        group: tensor-parallel group over which the classes are spread. All of its ranks get the same losses.
        sequence_parallel: `hidden` is this rank's share of the first dimension.
        main_grad: (classes, hidden size), float32; the weight gradient is added to it, and `weight` gets none.
        memory: the memory that it may take; None means the choice that the environment made for the process.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together; the reduction is none of the three.
    """
    place = Group.of(group, sequence_parallel=sequence_parallel)
    _check(hidden, weight, target, bias, class_weight, main_grad, place, reduction)
    terms = Terms(
        ignore_index=ignore_index, lse_square_scale=lse_square_scale, label_smoothing=label_smoothing, softcap=softcap
    )
    leaves = [each for each in (hidden, weight, bias) if each is not None]
    # The autograd function itself does not see the grad mode of its caller.
    comes_back = torch.is_grad_enabled() and any(each.requires_grad for each in leaves)
    options = (terms, reduction, place, memory or process_wide(), main_grad, comes_back)
    loss: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, target, class_weight, options)
    return loss.view(target.shape) if reduction == "none" else loss


Options = tuple[Terms, Reduction, Group, Memory, torch.Tensor | None, bool]


class _LinearCrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        options: Options,
    ) -> torch.Tensor:
        terms, reduction, group, memory, _, comes_back = options
        dtype = product_dtype(hidden, weight)
        labels = as_labels(target)
        layer = Layer(weight=weight, bias=bias, class_weight=class_weight)
        with torch.autocast(hidden.device.type, enabled=False):
            rows = gather(hidden.detach(), group).reshape(-1, hidden.shape[-1]).to(dtype).contiguous()
            found = forward_pass(rows, labels, layer, terms, group, memory, comes_back=comes_back)
            divisor = mean_divisor(labels, layer, terms, found.losses.dtype) if reduction == "mean" else None
        small = map(private_copy, (bias, labels, class_weight)) if comes_back else (bias, labels, class_weight)
        save(ctx, rows, weight, *small, divisor, *found.statistics)
        ctx.options, ctx.hidden = options, (hidden.shape, hidden.dtype)
        ctx.kept = found.kept
        if reduction == "none":
            return found.losses
        loss = found.losses.sum()
        return loss if divisor is None else loss / divisor

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        terms, _, group, memory, main_grad, _ = ctx.options
        rows, weight, bias, labels, class_weight, divisor, *statistics = saved(ctx)
        shape, dtype = ctx.hidden
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if divisor is not None:
            grad = grad / divisor
        with torch.autocast(rows.device.type, enabled=False):
            of_hidden, of_weight, of_bias = backward_pass(
                grad.reshape(-1).expand(labels.shape),
                rows,
                labels,
                Statistics(*statistics),
                Layer(weight=weight, bias=bias, class_weight=class_weight),
                terms,
                group,
                memory,
                GradientRequest(
                    hidden=needs_hidden,
                    hidden_dtype=dtype,
                    weight=needs_weight,
                    bias=needs_bias,
                    main_grad=main_grad if needs_weight else None,
                ),
                kept=ctx.kept,
            )
        return None if of_hidden is None else of_hidden.view(shape), of_weight, of_bias, None, None, None


def product_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Return the dtype that the product of the two has here, autocast included."""
    device = hidden.device.type
    if hidden.dtype != torch.float64 and torch.is_autocast_enabled(device):
        dtype: torch.dtype = torch.get_autocast_dtype(device)
        return dtype
    return hidden.dtype


def mean_divisor(labels: torch.Tensor, layer: Layer, terms: Terms, dtype: torch.dtype) -> torch.Tensor:
    """Return the divisor of a mean: the number of tokens that are not ignored, or the sum of their class weights."""
    if layer.class_weight is None:
        return (labels != terms.ignore_index).sum()
    return own_class_weight(labels, layer.class_weight, terms.ignore_index).sum(dtype=dtype)


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    main_grad: torch.Tensor | None,
    group: Group,
    reduction: str,
) -> None:
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f'reduction is {reduction!r}; it is one of "none", "sum", "mean"')
    given = {
        "hidden": hidden, "weight": weight, "target": target,
        "bias": bias, "class_weight": class_weight, "main_grad": main_grad,
    }  # fmt: skip
    tensors = {name: each for name, each in given.items() if each is not None}
    shapes = ", ".join(f"{name} {tuple(each.shape)}" for name, each in tensors.items())
    if (hidden.dim(), target.dim(), weight.dim()) not in {(2, 1, 2), (3, 2, 2)} or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"these shapes do not fit together: {shapes}")
    spread = group.ranks if group.scatters else 1
    if (hidden.shape[0] * spread, *hidden.shape[1:-1]) != tuple(target.shape):
        raise ValueError(f"there must be one target for each of the tokens of {spread} rank(s): {shapes}")
    expected = {
        "bias": (weight.shape[0],), "class_weight": (weight.shape[0] * group.ranks,), "main_grad": tuple(weight.shape),
    }  # fmt: skip
    for name, shape in expected.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            raise ValueError(f"{name} must be {shape}: {shapes}")
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}; without autocast they must be the same")
    if target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(f"target is {target.dtype}; it must be an integer")
    if main_grad is not None and main_grad.dtype != torch.float32:
        raise ValueError(f"main_grad is {main_grad.dtype}; it must be torch.float32")
    if len({each.device for each in tensors.values()}) > 1:
        where = ", ".join(f"{name} on {each.device}" for name, each in tensors.items())
        raise ValueError(f"these tensors must be on one device: {where}")
