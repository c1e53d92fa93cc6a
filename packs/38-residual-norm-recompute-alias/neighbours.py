"""Recomputed functions that are right without the overlay: none of what they return is in the storage of an input."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Neighbour, TargetAbsent, beside

PACK = beside(__file__)
Function = Callable[[Any, Any], Any]
"""Gets states, [s, d], and a weight, [d]."""


def _recomputed(function: Function, *, dtype: str = "float32", learns: bool = True) -> Mapping[str, object]:
    """Return what is computed with the outputs of a recomputed function, the bytes that are kept of these, and what is learnt.

    Args:
        function: returns one tensor or two, which the product that comes next saves.
        dtype: of all tensors.
        learns: whether there are gradients.
    """
    import torch

    module: Any = importlib.import_module(PACK.MODULE)
    if not hasattr(module, "CheckpointWithoutOutput"):
        raise TargetAbsent("nothing is recomputed without its output")
    torch.cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    try:
        module._get_share_storage()
    except Exception:  # noqa: BLE001 - torch raises what its compilers do
        module._share_storage_ext = SimpleNamespace(share_storage=PACK._copied)
    generator = torch.Generator().manual_seed(8)
    shapes = ((PACK.HIDDEN,), (PACK.HIDDEN, PACK.HIDDEN), (PACK.TOKENS, PACK.HIDDEN))
    weight, linear, given = (
        torch.randn(*shape, generator=generator).to(getattr(torch, dtype)).requires_grad_() for shape in shapes
    )
    with torch.set_grad_enabled(learns):
        checkpoint = module.CheckpointWithoutOutput(fp8=None)
        found = checkpoint.checkpoint(function, given * 1.5, weight)
        outputs = (found,) if isinstance(found, torch.Tensor) else found
        mixed = outputs[0] @ linear[: outputs[0].shape[1]]
        for each in outputs[1:]:
            mixed = mixed * each.repeat(1, PACK.HIDDEN // each.shape[1])
        checkpoint.discard_output_and_register_recompute(mixed)
        kept = [each.untyped_storage().nbytes() for each in outputs]
        result = mixed.sin()
    if not learns:
        return {"result": result, "kept": kept}
    result.sum().backward()
    return {"result": result, "kept": kept, "weight": weight.grad, "linear": linear.grad, "given": given.grad}


def _norm(states: Any, weight: Any) -> Any:
    return states * states.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * weight


def _norm_and_copy(states: Any, weight: Any) -> Any:
    return _norm(states, weight), states.clone()


def _halves(states: Any, weight: Any) -> Any:
    return _norm(states, weight).chunk(2, dim=-1)


def _neighbour(name: str, function: Function, **asked: Any) -> Neighbour:
    run = functools.partial(_recomputed, function, **asked)
    return Neighbour(name=name, overlay="residual-norm-recompute-alias", run=run)


NEIGHBOURS = (
    _neighbour("one-output", _norm),
    _neighbour("one-output-bfloat16", _norm, dtype="bfloat16"),
    _neighbour("copy-of-the-input", _norm_and_copy),
    _neighbour("halves-of-one-storage", _halves),
    _neighbour("no-gradients", _norm_and_copy, learns=False),
)
