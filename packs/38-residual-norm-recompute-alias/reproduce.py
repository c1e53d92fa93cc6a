"""Megatron's recomputed layer norms, with one that returns its input as the residual: does the layer still have it?

The real `CheckpointWithoutOutput` runs an RMS norm that returns what Transformer Engine's fused residual norm does: what it computed, and the
very tensor that it was given. A linear layer uses the one, the sum after it the other, as in a transformer layer. What is computed and all
gradients are to be those without recompute, bit by bit. It happens in a fork, and how that ended is part of what is seen.
"""

from __future__ import annotations

import importlib
import inspect
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

MODULE = "megatron.core.tensor_parallel.random"
ENGINE = "megatron.core.extensions.transformer_engine"
TOKENS, HIDDEN = 64, 32
SAME, OTHER, REFUSED = 0, 2, 3


def _run() -> Behaviour:
    import torch

    module: Any = importlib.import_module(MODULE)
    engine = Path(importlib.import_module(ENGINE).__file__ or "").read_text()
    if not hasattr(module, "CheckpointWithoutOutput") or "TEFusedResidualRMSNorm" not in engine:
        raise TargetAbsent("no norm that is recomputed returns its input")
    if "retain_input_tensors" in inspect.signature(module.CheckpointWithoutOutput).parameters:
        # Main since August 2026. Whether layers ask for it is decided by norms that no CPU can make.
        raise Blocked("outputs are kept for layers that ask for it, which they do for norms of Transformer Engine")
    # A host without a GPU has no state of its random numbers, and may have no compiler for what restores outputs.
    torch.cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    try:
        module._get_share_storage()  # noqa: SLF001 - it is compiled once, before the fork
    except Exception:  # noqa: BLE001 - torch raises what its compilers do
        module._share_storage_ext = SimpleNamespace(share_storage=_copied)  # noqa: SLF001
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "seen")
        if not (child := os.fork()):
            os._exit(_compared(module, notes))
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        seen = notes.read_text() if notes.exists() else "nothing was computed"
    how = f"the process died of signal {-ended}" if ended < 0 else f"the process ended with {ended}"
    return Behaviour(broken=ended != SAME, seen=f"a norm that returns its input, recomputed: {how}; {seen}")


def _compared(module: Any, notes: Path) -> int:
    """Compute without recompute and with it, and note how far apart outputs and gradients are."""
    import torch

    try:
        plain, recomputed = _step(module, recompute=False), _step(module, recompute=True)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is no answer
        notes.write_text(f"{type(error).__name__}: {error}")
        return REFUSED
    apart = max(float((one - other).abs().max()) for one, other in zip(plain, recomputed, strict=True))
    notes.write_text(f"what is computed, and three gradients, differ by up to {apart:.3e}")
    return SAME if all(map(torch.equal, plain, recomputed)) else OTHER


def _step(module: Any, *, recompute: bool) -> list[Any]:
    import torch

    class Norm(torch.autograd.Function):  # type: ignore[misc]
        """An RMS norm of x, [s, d], by a weight, [d]; the gradient of its residual is added to that of x."""

        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> tuple[Any, Any]:
            scale = x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
            ctx.save_for_backward(x, weight, scale)
            return x * scale * weight, x

        @staticmethod
        def backward(ctx: Any, normed: Any, residual: Any) -> tuple[Any, Any]:
            x, weight, scale = ctx.saved_tensors
            straight, weighted = x * scale, normed * weight
            along = (weighted * straight).mean(-1, keepdim=True)
            return (weighted - straight * along) * scale + residual, (normed * straight).sum(0)

    generator = torch.Generator().manual_seed(8)
    weight, linear, given = (
        torch.randn(*shape, generator=generator).requires_grad_()
        for shape in ((HIDDEN,), (HIDDEN, HIDDEN), (TOKENS, HIDDEN))
    )
    states = given * 1.5
    if recompute:
        checkpoint = module.CheckpointWithoutOutput(fp8=None)
        normed, residual = checkpoint.checkpoint(lambda x: Norm.apply(x, weight), states)
    else:
        normed, residual = Norm.apply(states, weight)
    mixed = normed @ linear
    if recompute:
        checkpoint.discard_output_and_register_recompute(mixed)
    result = mixed + residual
    result.sin().sum().backward()
    return [result.detach(), weight.grad, linear.grad, given.grad]


def _copied(to: Any, what: Any) -> None:
    """Restore an output as releases up to 0.16.1 do."""
    import torch

    with torch.no_grad():
        to.untyped_storage().resize_(what.untyped_storage().size())
        to.untyped_storage().copy_(what.untyped_storage())


CASES = (
    Case(
        name="norm-cpu",
        overlay="residual-norm-recompute-alias",
        device="cpu",
        versions=("torch",),
        run=_run,
        targets=(MODULE,),
    ),
)
