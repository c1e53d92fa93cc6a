"""Mamba-2's convolution and scan over packed documents in plain PyTorch: the truth that a mixer is measured against.

Both are written out for each pair of tokens that can see each other, so that nothing of one document can reach another
by construction. Quadratic in the tokens, in the dtype of the inputs (float64 for truth). Symbols: B batch, S tokens,
H heads, P channels of a head, G groups, N size of the state, W width of the convolution.

Without causal-conv1d, which is compiled against a GPU, `provide_causal_conv1d` gives the functions that mamba-ssm's fused scan calls.

Source: arguments and layout of `mamba_split_conv1d_scan_combined` in mamba-ssm 2.3.2.post1, mamba_ssm/ops/triton/
ssd_combined.py, and of `causal_conv1d.cpp_functions` as it is called there.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, seq_idx: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a causal convolution of each channel within each document, through SiLU.

    Args:
        x: (B, S, channels).
        weight: (channels, W), the weight of a token itself last.
        bias: (channels,).
        seq_idx: the document of each token, (B, S), or None for one document.
    """
    tokens, width = x.shape[1], weight.shape[1]
    total = bias.expand(x.shape)
    for back in range(min(width, tokens)):
        seen = F.pad(x, (0, 0, back, 0))[:, :tokens]
        if seq_idx is not None and back:
            same = F.pad(seq_idx, (back, 0), value=-1)[:, :tokens] == seq_idx
            seen = seen.masked_fill(~same[..., None], 0.0)
        total = total + seen * weight[:, width - 1 - back]
    return F.silu(total)


def scan(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,  # the names of the kernel that this replaces
    D: torch.Tensor,
    chunk_size: int = 0,
    *,
    headdim: int | None = None,
    ngroups: int = 1,
    seq_idx: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return the result of `mamba_split_conv1d_scan_combined` without a norm: convolution, scan, gate; (B, S, H * P).

    Args:
        zxbcdt: gate, values, both projections of the state, and steps, (B, S, 2 * H * P + 2 * G * N + H).
        conv1d_weight: (H * P + 2 * G * N, W).
        conv1d_bias: (H * P + 2 * G * N,).
        dt_bias: (H,).
        A: rates, negative, (H,).
        D: factor of the value that bypasses the state, (H,) or (H, P).
        chunk_size: ignored.
        headdim: P, where the shape of `D` does not contain it.
        ngroups: G.
        seq_idx: the document of each token, (B, S), or None for one document.
    """
    heads = A.shape[0]
    dim = heads * (headdim or D.shape[-1])
    z, xbc, dt = zxbcdt.split([dim, conv1d_weight.shape[0], heads], dim=-1)
    state = (conv1d_weight.shape[0] - dim) // 2
    x, b, c = convolve(xbc, conv1d_weight, conv1d_bias, seq_idx).split([dim, state, state], dim=-1)
    x = x.unflatten(-1, (heads, -1))
    b, c = (each.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, dim=2) for each in (b, c))
    dt = F.softplus(dt.to(dt_bias.dtype) + dt_bias)
    log_decay = (dt * A).cumsum(dim=1).permute(0, 2, 1)  # (B, H, S)
    places = torch.arange(x.shape[1], device=x.device)
    seen = (places[:, None] >= places)[None, None]
    if seq_idx is not None:
        seen = seen & (seq_idx[:, :, None] == seq_idx[:, None, :])[:, None]
    decay = (log_decay[..., :, None] - log_decay[..., None, :]).masked_fill(~seen, float("-inf")).exp()
    weights = torch.einsum("bshn,bthn->bhst", c, b) * decay
    y = torch.einsum("bhst,bth,bthp->bshp", weights.to(dt.dtype), dt, x.to(dt.dtype))
    y = y + x * (D if D.dim() == 2 else D[:, None])
    return (y.flatten(-2) * F.silu(z)).to(zxbcdt.dtype)


def provide_causal_conv1d() -> bool:
    """Let `causal_conv1d` be imported where it is not installed; return whether this had to be done.

    Only the functions that mamba-ssm's fused scan calls work: forward and backward with SiLU and without states of earlier calls.
    """
    if importlib.util.find_spec("causal_conv1d") is not None:
        return False
    package, functions, varlen = (
        ModuleType(f"causal_conv1d{rest}") for rest in ("", ".cpp_functions", ".causal_conv1d_varlen")
    )
    vars(package).update(
        __version__="1.6.0",
        __path__=[],
        causal_conv1d_fn=_not_provided,
        causal_conv1d_update=_not_provided,
    )
    vars(functions).update(
        causal_conv1d_fwd_function=_forward,
        causal_conv1d_bwd_function=_backward,
        causal_conv1d_update_function=_not_provided,
    )
    vars(varlen).update(causal_conv1d_varlen_states=_not_provided)
    sys.modules.update({each.__name__: each for each in (package, functions, varlen)})
    return True


def _not_provided(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("causal-conv1d is not installed, and a fused scan does not call this of it")


def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    final_states: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    if initial_states is not None or final_states is not None or not silu:
        _not_provided()
    with torch.no_grad():
        found = convolve(x.transpose(1, 2).float(), weight.float(), bias.float(), seq_idx)
        return found.to(x.dtype).transpose(1, 2)


def _backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dout: torch.Tensor,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    dx: torch.Tensor,
    return_dinitial_states: bool,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
    """Write the gradient of `x` into `dx`, as the compiled function does, and return it with those of weight and bias."""
    if initial_states is not None or dfinal_states is not None or return_dinitial_states or not silu:
        _not_provided()
    leaves = [each.detach().float().requires_grad_() for each in (x.transpose(1, 2), weight, bias)]
    with torch.enable_grad():
        output = convolve(leaves[0], leaves[1], leaves[2], seq_idx)
        found = torch.autograd.grad(output, leaves, dout.transpose(1, 2).float())
    dx.copy_(found[0].transpose(1, 2))
    return dx, found[1].to(weight.dtype), found[2].to(bias.dtype), None
