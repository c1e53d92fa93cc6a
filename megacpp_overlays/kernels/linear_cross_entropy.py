"""Gradients of a linear cross entropy whose loss is kept per token.

The gradient that arrives differs from token to token, so it has to be applied to the logits' gradient before the
products that sum over tokens. That is only possible in the backward pass; the logits are computed again there,
a chunk of tokens at a time.

Plain PyTorch, any device, no host synchronisation. The definition of the loss is in
`linear_cross_entropy_reference`.
"""

from __future__ import annotations

import torch


@torch.no_grad()  # type: ignore[untyped-decorator]
def linear_cross_entropy_gradients(
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
    accum_dtype: torch.dtype | None = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients for `x`, `weight` and `bias`.

    Logits are formed in the dtype that `x @ weight.t()` has here, autocast included, so they are those of the
    forward pass. Their gradient is formed in float32 (float64 for float64), scaled there, and rounded once
    before the products.

    Args:
        x: hidden states, (tokens, hidden), any strides.
        weight: output layer, (vocabulary, hidden).
        target: class of each token, (tokens,); integer.
        grad_output: gradient that arrives for each token, (tokens,), any strides.
        bias: (vocabulary,).
        ce_weight: weight of each class, (vocabulary,).
        ignore_index: tokens with this target get and give no gradient, whatever their logits are.
        lse_square_scale: factor of the z-loss.
        label_smoothing: share of the loss that is spread evenly over all classes; a negative share counts as none.
        softcap: bound of the logits.
        token_scaling: the loss of a token was multiplied by its predicted probability, taken as a constant.
        accum_dtype: dtype in which the chunks' gradients are added up. None means the dtype of `weight` for
            `weight`, where a wider sum would cost memory of its size, and float32 for `bias`.
        needs: which of the three gradients are wanted.

    Returns:
        Fresh tensors of the shape and dtype of `x`, `weight` and `bias`; None where not wanted or without bias.
    """
    tokens, hidden = x.shape
    vocabulary = weight.shape[0]
    product_dtype = (x[:0] @ weight[:0].t()).dtype
    factors = weight.to(product_dtype)
    wide = torch.float64 if product_dtype == torch.float64 else torch.float32

    grad_x = torch.empty_like(x) if needs[0] else None
    grad_weight = torch.zeros_like(weight, dtype=accum_dtype or weight.dtype) if needs[1] else None
    grad_bias = torch.zeros_like(bias, dtype=accum_dtype or wide) if needs[2] and bias is not None else None

    step = _chunk_size(tokens, hidden, vocabulary)
    for start in range(0, tokens, step):
        rows = slice(start, start + step)
        x_rows = x[rows].to(product_dtype)
        logits = x_rows @ factors.t()
        if bias is not None:
            logits = logits + bias
        wide_gradient = _logits_gradient(
            logits,
            target[rows],
            grad_output[rows],
            wide=wide,
            ce_weight=ce_weight,
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            softcap=softcap,
            token_scaling=token_scaling,
        )
        if grad_bias is not None:
            grad_bias += wide_gradient.sum(dim=0)
        gradient = wide_gradient.to(product_dtype)
        if grad_x is not None:
            grad_x[rows] = gradient @ factors
        if grad_weight is not None:
            _add_product(grad_weight, gradient.t(), x_rows)

    return (
        grad_x,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )


def _chunk_size(tokens: int, hidden: int, vocabulary: int) -> int:
    """Return how many tokens share one block of logits: as many as keep it about the size of `x`.

    This is the size that liger-kernel 0.3.0 to 0.8.2 uses, so the products here are those of its forward pass.
    """
    blocks = max(1, -(-vocabulary // hidden))
    return 1 << max(0, -(-tokens // blocks) - 1).bit_length()


def _logits_gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    grad_output: torch.Tensor,
    *,
    wide: torch.dtype,
    ce_weight: torch.Tensor | None,
    ignore_index: int,
    lse_square_scale: float,
    label_smoothing: float,
    softcap: float | None,
    token_scaling: bool,
) -> torch.Tensor:
    """Return the gradient for a chunk of logits, which may be overwritten, in the wide dtype."""
    kept = target != ignore_index
    column = torch.where(kept, target, 0).to(torch.int64).unsqueeze(1)
    scale = torch.where(kept, grad_output, 0).to(wide)
    if token_scaling:
        scale = scale * _predicted_probability(logits, column, softcap)
    scale = scale.unsqueeze(1)

    values = logits.to(wide)
    slope = None
    if softcap is not None:
        values.div_(softcap).tanh_()
        slope = 1 - values.square()
        values.mul_(softcap)
    highest = values.amax(dim=1, keepdim=True)
    values.sub_(highest).exp_()
    total = values.sum(dim=1, keepdim=True)
    lse = highest + total.log()

    # loss = hard * nll(target) + sum over classes of spread * nll(class) + lse_square_scale * lse ** 2
    smoothing = max(0.0, label_smoothing)
    spread = smoothing / logits.shape[1]
    hard: torch.Tensor | float = 1 - smoothing
    soft: torch.Tensor | float = smoothing
    if ce_weight is not None:
        hard = hard * ce_weight[column].to(wide)
        soft = spread * ce_weight.sum().to(wide)  # summed in its own dtype, as the forward pass does

    values.mul_(scale * (hard + soft + 2 * lse_square_scale * lse) / total)
    if smoothing and ce_weight is None:
        values.sub_(scale * spread)
    elif smoothing and ce_weight is not None:
        values.addcmul_(scale, ce_weight.to(wide), value=-spread)
    # One column a row, so nothing collides: unlike scatter_add_, this is deterministic on every device.
    values.scatter_(1, column, values.gather(1, column) - scale * hard)
    if slope is not None:
        values.mul_(slope)
    # Not by a zero scale: the logits of padding may be infinite.
    return values.masked_fill_(~kept.unsqueeze(1), 0)


def _predicted_probability(logits: torch.Tensor, column: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Return the factor of token scaling, (rows,), rounded as the forward pass rounds it.

    The forward pass caps and normalises in the dtype of the logits; half precision moves the factor by some percent.
    """
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return torch.softmax(capped, dim=1).gather(1, column).squeeze(1)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
