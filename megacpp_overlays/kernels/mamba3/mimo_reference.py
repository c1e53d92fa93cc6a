"""Mamba-3 MIMO in plain PyTorch: the truth that gradients are measured against, and kernels made of it for the CPU.

The recurrence is written out as a masked product of queries and keys, quadratic in the sequence, in the dtype of the
inputs (use float64 for truth). Symbols: B batch, S sequence, H heads, G groups, R rank, N dim of keys, P dim of values.

Source: the exponential-trapezoidal recurrence as mamba_ssm's own tests state it, step by step, in
tests/ops/tilelang/test_mamba3_mimo.py of mamba-ssm 2.3.2.post1; rotation pairs n with N/2 + n, as its kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class Inputs(NamedTuple):
    """Inputs of a layer's scan, between its projections."""

    q: torch.Tensor
    """(B, S, R, G, N)."""
    k: torch.Tensor
    """(B, S, R, G, N)."""
    v: torch.Tensor
    """(B, S, H, P)."""
    adt: torch.Tensor
    """Log of the decay of each step, (B, H, S)."""
    dt: torch.Tensor
    """Steps, (B, H, S)."""
    trap: torch.Tensor
    """Share of the trapezoid before its sigmoid, (B, H, S)."""
    q_bias: torch.Tensor
    """(H, R, N)."""
    k_bias: torch.Tensor
    """(H, R, N)."""
    mimo_v: torch.Tensor
    """(H, R, P)."""
    mimo_z: torch.Tensor | None
    """(H, R, P); None where there is no gate."""
    mimo_o: torch.Tensor | None
    """(H, R, P); None where the ranks are not reduced."""
    angles: torch.Tensor
    """Rotation at each step, as `cumulative_angles` returns it, (B, S, H, N // 2 or N // 4)."""
    d: torch.Tensor | None
    """Weight of the skip, (H,)."""
    z: torch.Tensor | None
    """Gate, (B, S, H, P)."""


def of_heads(grouped: torch.Tensor, heads: int) -> torch.Tensor:
    """Return (B, S, R, H, N) from (B, S, R, G, N): head h reads group h // (H // G)."""
    return grouped.repeat_interleave(heads // grouped.shape[3], dim=3)


def cumulative_angles(angles: torch.Tensor, dt: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Return rotations from raw angles, (B, S, H, A), and steps, (B, H, S), begun anew with each packed sequence."""
    turned = torch.tanh(angles) * dt.transpose(1, 2).unsqueeze(-1) * math.pi
    return torch.cat([part.cumsum(1) for part in turned.split(_spans(angles.shape[1], lengths), dim=1)], dim=1)


def forward(inputs: Inputs, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Return the output of a layer between its projections.

    Args:
        inputs: all of one dtype.
        lengths: bounds of packed sequences, (sequences + 1,), from 0 to S; None for one sequence in each batch entry.

    Returns:
        (B, S, H, P), or (B, S, R, H, P) without `mimo_o`.
    """
    q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, mimo_z, mimo_o, angles, d, z = inputs
    heads, spans = v.shape[2], _spans(v.shape[1], lengths)
    queries = _rotated(of_heads(q, heads) + q_bias.transpose(0, 1), angles)
    keys = _rotated(of_heads(k, heads) + k_bias.transpose(0, 1), angles)
    values = torch.einsum("bshp,hrp->bsrhp", v, mimo_v)
    now = dt * torch.sigmoid(trap)
    later = [F.pad(part[..., 1:], (0, 1)) for part in (dt * torch.sigmoid(-trap)).split(spans, dim=2)]
    weights = _decay(adt, spans) * (now + torch.cat(later, dim=2)).unsqueeze(2) + torch.diag_embed(now)
    products = torch.einsum("btihn,bsjhn->bhtisj", queries, keys) * weights[:, :, :, None, :, None]
    out = torch.einsum("bhtisj,bsjhp->btihp", products, values)
    if d is not None:
        out = out + values * d[:, None]
    if z is not None:
        out = out * F.silu(torch.einsum("bshp,hrp->bsrhp", z, mimo_z))
    return out if mimo_o is None else torch.einsum("btihp,hip->bthp", out, mimo_o)


def gradients(inputs: Inputs, dout: torch.Tensor, lengths: torch.Tensor | None = None) -> Inputs:
    """Return gradients in float64, those of q and k for each head: (B, S, R, H, N)."""
    heads = inputs.v.shape[2]
    gate = None if inputs.z is None else inputs.mimo_z
    per_head = inputs._replace(q=of_heads(inputs.q, heads), k=of_heads(inputs.k, heads), mimo_z=gate)
    wide = [None if each is None else each.detach().double().requires_grad_() for each in per_head]
    with torch.enable_grad():
        out = forward(Inputs(*wide), lengths)
        found = iter(torch.autograd.grad(out, [each for each in wide if each is not None], dout.double()))
    return Inputs(*(None if each is None else next(found) for each in wide))


def _spans(sequence: int, lengths: torch.Tensor | None) -> list[int]:
    return [sequence] if lengths is None else lengths.diff().tolist()


def _decay(adt: torch.Tensor, spans: list[int]) -> torch.Tensor:
    """Return how much of an earlier step is left at a later one of the same sequence, (B, H, S, S); else zero."""
    total = adt.cumsum(2)
    number = torch.arange(len(spans), device=adt.device).repeat_interleave(torch.tensor(spans, device=adt.device))
    step = torch.arange(adt.shape[2], device=adt.device)
    earlier = (step[:, None] > step) & (number[:, None] == number)
    return (total.unsqueeze(3) - total.unsqueeze(2)).masked_fill(~earlier, -math.inf).exp()


def _rotated(vectors: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    turned, half = angles.shape[-1], vectors.shape[-1] // 2
    first, first_kept, second, second_kept = vectors.split([turned, half - turned, turned, half - turned], dim=-1)
    cos, sin = torch.cos(angles).unsqueeze(2), torch.sin(angles).unsqueeze(2)
    return torch.cat([cos * first - sin * second, first_kept, sin * first + cos * second, second_kept], dim=-1)


# Replacements of upstream's kernels where there is no GPU


def kernels() -> dict[str, Callable[..., Any]]:
    """Return names of the two backward modules of mamba-ssm 2.3.2.post1, with functions that compute the same in PyTorch.

    The kernels take tensors on any device in any floating dtype, compute in float64, and write gradients for each head,
    as upstream's do. The argument for upstream's `dA_cs` is read as the log decay itself, and its gradient is the
    whole gradient of the log decay. The Triton helpers only return the numbers that the second kernel wrote.
    """
    found: dict[str, Callable[..., Any]] = {
        "mamba_mimo_bwd_fwd": lambda *_: _forward_part,
        "mamba_mimo_bwd_bwd": lambda *_: _backward_part,
    }
    for suffix in ("", "_varlen"):
        found[f"bwd_dtrap_ddt_triton{suffix}"] = lambda trap, dt, dfactor, dgamma, *_: (dfactor.to(dt), dgamma.to(trap))
        found[f"bwd_dadt_fused_triton{suffix}"] = lambda *_: 0.0
    return found


def _forward_part(*tensors: Any) -> None:
    dout, q, k, v, q_bias, k_bias, mimo_v, mimo_o, dmimo_o, _, z, mimo_z, dz, dmimo_z, angles, *rest = tensors
    adt, _, dt, trap, d, _, _, *lengths = rest
    inputs = Inputs(q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, mimo_z, mimo_o, angles, d, z)
    found = gradients(inputs, dout, *lengths)
    for target, gradient in ((dmimo_o, found.mimo_o), (dz, found.z), (dmimo_z, found.mimo_z)):
        _write(target, gradient)


def _backward_part(*tensors: Any) -> None:
    dout, q, k, v, q_bias, k_bias, mimo_v, mimo_o, dk, dv, dmimo_v, _, dq, z, mimo_z, angles, *rest = tensors
    adt, _, dt, trap, dfactor, dgamma, dangles, d, dd, _, dadt, _, _, _, _, *lengths = rest
    inputs = Inputs(q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, mimo_z, mimo_o, angles, d, z)
    found = gradients(inputs, dout, *lengths)
    _write(dq, found.q.flatten(1, 2))
    _write(dk, found.k.flatten(1, 2))
    for target, gradient in ((dv, found.v), (dfactor, found.dt), (dgamma, found.trap), (dangles, found.angles)):
        _write(target, gradient)
    for target, gradient in ((dadt, found.adt), (dmimo_v, found.mimo_v), (dd, found.d)):
        _write(target, gradient)


def _write(target: torch.Tensor | None, gradient: torch.Tensor | None) -> None:
    """Write a gradient where the kernel would. Of one without a batch, the host sums (B, H, ...) or (B, H, sequences, ...)."""
    if target is None or gradient is None:
        return
    if target.shape != gradient.shape:
        target.zero_()
        target = target[0] if target.dim() == gradient.dim() + 1 else target[0, :, 0]
    target.copy_(gradient)
