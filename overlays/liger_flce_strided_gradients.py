"""Scaling of gradients of transposed weights and hidden states by the gradient of the loss in Liger's fused linear cross entropy.

The loss makes gradients in its forward pass, in the layout of their tensors, and its backward pass multiplies them, row by row, with a kernel that assumes contiguous rows. The rows of a gradient of a transposed weight are not contiguous: some
numbers are multiplied many times and others never. Here such gradients are first copied into contiguous rows, which has no effect where the factor is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from megacpp_overlays.feature_probes import liger_flce_strided_gradients as feature
from megacpp_overlays.model import Observation, Overlay, Replacement
from megacpp_overlays.runtime.in_this_thread import Instead, answer

_KERNEL = "element_mul_kernel"


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def fused_linear_cross_entropy_backward(grad_output: Any, grad_input: Any, grad_weight: Any, grad_bias: Any) -> Any:
        return original(grad_output, _in_rows(grad_input), _in_rows(grad_weight), grad_bias)

    return fused_linear_cross_entropy_backward


def _in_rows(gradient: Any) -> Any:
    """Return a gradient whose rows are contiguous: itself, or a copy."""
    return gradient if gradient is None or gradient.stride(-1) == 1 else gradient.contiguous()


def observe(module: ModuleType) -> Observation:
    """Multiply the gradient of a transposed weight, with a stub of the kernel that records whether rows are contiguous."""
    import torch

    contiguous: list[bool] = []

    def launch(gradient: Any, *_: Any, **named: Any) -> None:
        contiguous.append(gradient.stride(-1) == named.get("X_col_stride", 1))

    theirs = vars(module)[_KERNEL]
    with torch.inference_mode(False):
        plain, strided = torch.ones(3, 2, device="cpu"), torch.ones(2, 3, device="cpu").t()
        vars(module)[_KERNEL] = Instead(theirs, __getitem__=answer(lambda _: launch, theirs.__getitem__))
        try:
            getattr(module, feature.TARGET.symbol)(torch.full((), 2.0, device="cpu"), plain, strided, None)
        finally:
            vars(module)[_KERNEL] = theirs
    return Observation(
        broken=not all(contiguous),
        seen=f"of a plain gradient and of one of a transposed weight the kernel gets rows that are contiguous: {contiguous}",
    )


OVERLAY = Overlay(
    id="liger-flce-strided-gradients",
    pack=72,
    title="multiply gradients of transposed weights in Liger's fused linear cross entropy in their own places",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.CONTIGUOUS_ROWS: (Replacement(symbol=feature.TARGET.symbol, make=_make),)},
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "the gradient of a transposed output layer is not scaled with the loss in Liger's fused linear cross entropy",
        "`weight.t()` as the output layer of Liger's loss learns wrongly with a loss scale or gradient accumulation",
    ),
    concerns="liger_loss",
    breaks="gradients of a transposed output layer are wrong with `mean` or `sum` where the loss is multiplied by anything, as by a loss scale or over accumulation steps",
    brief="gradients of transposed output layers",
    until="the kernel has a column stride",
    retire_when="every supported liger-kernel is 0.8.5 or newer",
    threads=(),
    last_validated="2026-11-30, H200: liger-kernel 0.8.4; x86-64 in the Triton interpreter, torch 2.11.0: 0.3.0, 0.4.2, 0.5.10 and 0.6.0 to 0.8.5 of those that were tried",
)
