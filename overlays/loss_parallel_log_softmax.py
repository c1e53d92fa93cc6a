"""Give `log_softmax` its own gradient under torch's `loss_parallel`.

Upstream computes the gradient of cross entropy in `nll_loss` and passes every gradient of `log_softmax` on as it comes. Here the pass subtracts the softmax times the
sum over classes, which ranks of the sharded dimension add up: one number for each row. A gradient that is cross entropy's alone is passed on as before, with the same bits
and without that sum. Where it is added to others, as in a loss with an entropy, the subtraction is right for the sum of all: cross entropy's rows sum to zero.

Source: https://github.com/pytorch/pytorch/issues/190746
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from megacpp_overlays.feature_probes import loss_parallel_log_softmax as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime.tensor_notes import TensorNotes

_of_cross_entropy: TensorNotes[bool] = TensorNotes()
"""Local gradients that cross entropy has made. Autograd adds other gradients to a DTensor out of place, and hooks must not change their argument."""


def _marked(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def nll_loss_and_log_softmax_backward(*arguments: Any, **more: Any) -> Any:
        found = original(*arguments, **more)
        _of_cross_entropy.set(found, True)
        return found

    return nll_loss_and_log_softmax_backward


def _enabling(original: Callable[[], None], module: ModuleType) -> Callable[[], None]:
    def enable_custom_loss_ops() -> None:
        original()
        passes = _passes(module)
        stock = passes[operation := _operation(module)]

        def log_softmax_backward_handler(op_call: Any, args: Any, kwargs: Any) -> Any:
            gradient, output, dimension, *more = args
            if not _is_cross_entropys(gradient):
                gradient = _through_log_softmax(module, gradient, output, dimension)
            return stock(op_call, (gradient, output, dimension, *more), kwargs)

        passes[operation] = log_softmax_backward_handler

    return enable_custom_loss_ops


def _passes(module: ModuleType) -> dict[Any, Callable[..., Any]]:
    """Return the table of passes that operations of DTensors have in this process."""
    found: dict[Any, Callable[..., Any]] = module.DTensor._op_dispatcher._custom_op_handlers  # noqa: SLF001 - as upstream
    return found


def _operation(module: ModuleType) -> Any:
    return module.aten._log_softmax_backward_data.default  # noqa: SLF001 - the name of the operation


def _is_cross_entropys(gradient: Any) -> bool:
    """Return whether a gradient is the one that cross entropy has made, to which nothing was added since."""
    return _of_cross_entropy.get(getattr(gradient, "_local_tensor", None)) is not None


def _through_log_softmax(module: ModuleType, gradient: Any, output: Any, dimension: int) -> Any:
    """Return the gradient of the input of `log_softmax`, in float32 at least.

    Args:
        module: of upstream.
        gradient: of the output, sharded in any way.
        output: of `log_softmax`, classes sharded over one dimension of a mesh.
        dimension: of classes.
    """
    import torch

    wide = torch.promote_types(gradient.dtype, torch.float32)
    if is_sharded := isinstance(gradient, module.DTensor):
        gradient = gradient.redistribute(output.device_mesh, output.placements)
    gradient = gradient.to(wide)
    total = gradient.sum(dimension, keepdim=True)
    if is_sharded:
        whole = [module.Replicate() if each.is_partial() else each for each in total.placements]
        total = total.redistribute(total.device_mesh, whole)
    return gradient - output.to(wide).exp() * total


def observe(module: ModuleType) -> Observation:
    """Hand the pass that is enabled a gradient of one of two equal classes."""
    import torch

    gradient, output = torch.tensor([[1.0, 0.0]], device="cpu"), torch.tensor([[0.5, 0.5]], device="cpu").log()
    passes = _passes(module)
    before = dict(passes)
    try:
        getattr(module, feature.TARGET.symbol)()
        found = passes[_operation(module)](None, (gradient, output, 1, torch.float32), {}).tolist()
    finally:
        passes.clear()
        passes.update(before)
    return Observation(broken=found != [[0.5, -0.5]], seen=f"the gradient of one of two equal classes is {found}")


OVERLAY = Overlay(
    id="loss-parallel-log-softmax",
    pack=60,
    title="give log_softmax its own gradient under torch's loss_parallel",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={
        feature.IDENTITY: (
            Replacement(symbol=feature.TARGET.symbol, make=_enabling),
            Replacement(symbol=feature.FUSED, make=_marked),
        )
    },
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "distillation with loss_parallel does not learn",
        "gradients differ between loss_parallel and one rank",
        "entropy bonus has no effect under loss_parallel",
        "preference loss (DPO) diverges with tensor parallelism in torch",
    ),
    concerns="every model",
    breaks="under torch's loss_parallel every log_softmax but that of cross entropy has the identity's gradient: distillation, entropies and preference losses "
    "push logits in other directions",
    retire_when="the backward pass of log_softmax under loss_parallel has its own gradient",
    brief="log_softmax under loss_parallel",
    until="its backward pass is its own",
    threads=(
        Thread(repository="pytorch/pytorch", number=190746, state="open, reported 2026-07"),
        Thread(repository="pytorch/pytorch", number=191606, state="open, opened 2026-07-30"),
        Thread(repository="pytorch/pytorch", number=191479, state="closed, opened 2026-07-29"),
    ),
    last_validated="2026-11-28, x86-64 without GPU, two gloo ranks: torch 2.11.0, 2.13.0 and 2.15.0; 2.11.0 to 2.15.0 read",
)
