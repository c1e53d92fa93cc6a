"""Sparse attention of dimensions that the TileLang backend of DSA has no kernel for: does it return anything?

Through the function that the backend calls. On the CPU small problems of other channels, heads and top-k; where TileLang is
installed its kernel is not reached by any of them. On the GPU the peak of memory of whole steps is shown as well. Values are
compared with float64.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

_MODULE = "megatron.core.transformer.experimental_attention_variant.ops.tilelang_dsa"
_FUNCTION = "run_fused_absorbed_sparse_attention"
_MIB = 1 << 20
_TOLERANCE = 1e-2
"""Relative, in the Frobenius norm: bfloat16 in and out."""

_DIMENSIONS = (
    ("320/256 channels", 16, 320, 256, 1.0),
    ("192/128 channels", 16, 192, 128, 1.0),
    ("48 heads", 48, 576, 512, 1.0),
    ("a top-k that is no multiple of 64", 16, 576, 512, 100 / 128),
)
"""A name, heads, channels of keys and of values, and the share of the slots that is asked for."""


def _attention() -> Callable[..., Any]:
    try:
        module = importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        if not _MODULE.startswith(str(error.name)):
            raise Blocked(f"{_MODULE} cannot be imported without {error.name}") from error
        raise TargetAbsent(f"there is no {_MODULE}") from error
    if (function := getattr(module, _FUNCTION, None)) is None:
        raise TargetAbsent(f"there is no {_FUNCTION}")
    return function  # type: ignore[no-any-return]


def _measure(rows: int, slots: int, device: str) -> Behaviour:
    attention = _attention()
    seen = [
        f"{name}: {_asked(attention, rows, heads, dim, value, round(share * slots), device)}"
        for name, heads, dim, value, share in _DIMENSIONS
    ]
    declined = sum(each.endswith("declined") for each in seen)
    return Behaviour(broken=declined > 0, seen=f"{rows} queries and keys; {'; '.join(seen)}")


def _asked(
    attention: Callable[..., Any], rows: int, heads: int, dim: int, value: int, slots: int, device: str
) -> str:
    """Say what attention returned, and how far it is from float64.

    Raises:
        ArithmeticError: a value is wrong.
    """
    import torch

    generator = torch.Generator(device).manual_seed(2)
    query, key = (
        torch.randn((rows, 1, heads_here, dim), generator=generator, device=device).bfloat16().requires_grad_()
        for heads_here in (heads, 1)
    )
    chosen = torch.rand((1, rows, rows), generator=generator, device=device).topk(slots, dim=-1).indices
    chosen = chosen.masked_fill(chosen > torch.arange(rows, device=device)[:, None], -1).int()
    scale = dim**-0.5
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    output = attention(query, key, chosen, scale, value)
    if output is None:
        return "declined"
    torch.autograd.grad(output, [query, key], torch.ones_like(output))
    peak = f", peak {(torch.cuda.max_memory_allocated() - before) // _MIB} MiB" if device == "cuda" else ""
    true = output.detach().double()
    for row in range(rows):
        keys = key.detach()[chosen[0, row][chosen[0, row] >= 0].long(), 0, 0].double()
        shares = torch.softmax(query.detach()[row, 0].double() @ keys.mT * scale, dim=-1)
        true[row, 0] = shares @ keys[:, :value]
    error = float((output.double() - true).norm() / true.norm())
    if not error <= _TOLERANCE:
        raise ArithmeticError(f"relative error against float64: {error:.1e}")
    return f"served, relative error {error:.1e}{peak}"


def _cpu() -> Behaviour:
    return _measure(160, 128, "cpu")


def _gpu() -> Behaviour:
    return _measure(4096, 2048, "cuda")


def _case(name: str, device: str, run: Callable[[], Behaviour]) -> Case:
    return Case(
        name=name,
        overlay="sparse-mla-dimensions",
        device=device,
        versions=("megatron-core", "torch", "triton", "tilelang"),
        run=run,
    )


CASES = (_case("dimensions-cpu", "cpu", _cpu), _case("dimensions-gpu", "cuda", _gpu))
