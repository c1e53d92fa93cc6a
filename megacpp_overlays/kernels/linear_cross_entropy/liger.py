"""Calls of Liger's fused linear cross entropy in the terms of this package's kernel.

Arguments have upstream's names and meaning, in every release from 0.5.3 on. torch is imported when a call comes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megacpp_overlays.frozen import NamedTuple

if TYPE_CHECKING:
    import torch

    from megacpp_overlays.kernels.linear_cross_entropy.parallel import Forward, Layer, Terms

METRICS = ("return_token_accuracy", "return_predicted_tokens")
"""Outputs in addition to the losses that upstream's forward pass can be asked for."""
_TENSORS = ("_input", "weight", "target", "bias", "ce_weight")
_TERMS = {
    "ignore_index": "ignore_index",
    "lse_square_scale": "lse_square_scale",
    "label_smoothing": "label_smoothing",
    "softcap": "softcap",
    "use_token_scaling": "token_scaling",
}
"""Terms of the loss by upstream's name. A release that lacks one computes as with the kernel's default."""


class Call(NamedTuple):
    """Arguments of the passes of the kernel."""

    rows: torch.Tensor
    """(tokens, hidden size), in the dtype that upstream's product has here."""
    labels: torch.Tensor
    """(tokens,)."""
    layer: Layer
    terms: Terms


def parameters(function: Callable[..., Any], *, behind: int = 0) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the parameter names of a function but the first ones, and the defaults."""
    taken = list(inspect.signature(function).parameters.values())[behind:]
    return tuple(p.name for p in taken), {p.name: p.default for p in taken if p.default is not inspect.Parameter.empty}


def named(
    names: tuple[str, ...], defaults: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return all arguments by name; None where they do not fit, which upstream then says in its words."""
    given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    fits = len(args) + len(kwargs) == len({*names[: len(args)], *kwargs}) and given.keys() == set(names)
    return given if fits else None


def is_usual(given: Mapping[str, Any]) -> bool:
    """Return whether upstream is known to take these arguments, whatever metrics they ask for.

    Raises:
        ValueError: there are fewer targets than tokens. Upstream reads past their end.
    """
    import torch

    x, weight, target, bias, ce_weight = (given[name] for name in _TENSORS)
    given_tensors = [x, weight, target, *(each for each in (bias, ce_weight) if each is not None)]
    if not all(isinstance(each, torch.Tensor) for each in given_tensors):
        return False
    if x.dim() > 0 and target.numel() < x.shape[0]:
        raise ValueError(f"{x.shape[0]} tokens have only {target.numel()} targets")
    gathers = ce_weight is not None or given.get("use_token_scaling", False)
    casts = torch.is_autocast_enabled(x.device.type) and torch.float64 not in (x.dtype, weight.dtype)
    return (
        isinstance(given["return_z_loss"], bool)
        and x.dim() == weight.dim() == 2
        and x.shape[1] == weight.shape[1]
        and x.is_floating_point()
        and (x.dtype == weight.dtype or casts)
        and x.numel() > 0
        and weight.numel() > 0
        and target.shape == x.shape[:1]
        and (target.dtype == torch.int64 or (target.dtype == torch.int32 and not gathers))
        and all(each is None or each.shape == weight.shape[:1] for each in (bias, ce_weight))
        and (ce_weight is None or ce_weight.is_floating_point())
        and all(each.device == x.device for each in given_tensors)
    )


def understood(given: Mapping[str, Any]) -> Call:
    """Return a call, usual or not, for the passes of the kernel."""
    from megacpp_overlays.kernels.linear_cross_entropy.function import product_dtype
    from megacpp_overlays.kernels.linear_cross_entropy.parallel import Layer, Terms, as_labels

    x, weight, target, bias, ce_weight = (given[name] for name in _TENSORS)
    rows = x.to(product_dtype(x, weight)).contiguous()
    labels = as_labels(target.reshape(-1)[: len(rows)])  # upstream does not look at more of them either
    terms = Terms(**{ours: given[theirs] for theirs, ours in _TERMS.items() if theirs in given})
    return Call(rows, labels, Layer(weight=weight, bias=of_each_class(bias, weight), class_weight=ce_weight), terms)


def of_each_class(bias: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor | None:
    """Return the bias as upstream's addition spreads it."""
    return None if bias is None else bias.expand(1, len(weight))[0]


def z_losses(found: Forward, given: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the part of the losses that is the z-loss, (tokens,); None where it was not asked for."""
    import torch

    if not given.get("return_z_loss", False):
        return None
    return torch.zeros_like(found.losses) if found.z_losses is None else found.z_losses
