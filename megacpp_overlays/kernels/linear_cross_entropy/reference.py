"""Linear cross entropy in plain PyTorch: the truth that kernels, overlays and demonstrations are measured against.

Unchunked, any floating dtype (use float64 for truth), differentiable by autograd. The definition of the loss is
that of `liger_cross_entropy_kernel` in liger-kernel 0.5.3 to 0.8.5 with `reduction="none"`, which for the plain,
weighted and smoothed terms is that of `torch.nn.functional.cross_entropy`.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def token_losses(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    token_scaling: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of every token, and the part of it that is the z-loss.

    Args:
        x: hidden states, (tokens, hidden).
        weight: output layer, (vocabulary, hidden).
        target: class of each token, (tokens,); integer.
        bias: (vocabulary,).
        ce_weight: weight of each class, (vocabulary,).
        ignore_index: tokens with this target have loss 0.
        lse_square_scale: factor of the z-loss, the squared log-sum-exp of the logits.
        label_smoothing: share of the loss that is spread evenly over all classes, 0 to 1.
        softcap: bound of the logits, `softcap * tanh(logits / softcap)`.
        token_scaling: multiply both losses of a token by its predicted probability, taken as a constant.

    Returns:
        Two tensors of shape (tokens,) and the dtype of `x`. The first includes the second.
    """
    logits = x @ weight.t()
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    target = target.to(torch.int64)  # bytes have no -100
    kept = target != ignore_index
    loss = functional.cross_entropy(
        logits, target, ce_weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    z_loss = torch.where(kept, lse_square_scale * torch.logsumexp(logits, dim=1).square(), 0)
    loss = loss + z_loss
    if token_scaling:
        column = torch.where(kept, target, 0).unsqueeze(1)
        probability = torch.softmax(logits.detach(), dim=1).gather(1, column).squeeze(1)
        return loss * probability, z_loss * probability
    return loss, z_loss


def gradients(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    grad_output: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    token_scaling: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the gradients of `(token_losses * grad_output).sum()` for `x`, `weight` and `bias`, by autograd.

    Args:
        grad_output: gradient that arrives for each token, (tokens,). All else is as in `token_losses`.

    Returns:
        Gradients of the shape and dtype of `x`, `weight` and `bias`; None for a bias that is not there.
    """
    leaves = [None if tensor is None else tensor.detach().clone().requires_grad_() for tensor in (x, weight, bias)]
    with torch.enable_grad():
        loss, _ = token_losses(
            leaves[0],
            leaves[1],
            target,
            bias=leaves[2],
            ce_weight=ce_weight,
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            softcap=softcap,
            token_scaling=token_scaling,
        )
    found = torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None], grad_output.to(loss.dtype))
    return found[0], found[1], found[2] if bias is not None else None
