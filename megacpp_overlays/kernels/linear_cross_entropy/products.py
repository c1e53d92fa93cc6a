"""Products of two matrices of one dtype, summed in float32 and written where and in the dtype that is asked for.

cuBLAS can write float32 from half precision, and can add to the present values. Torch offers that since 2.8, on CUDA; elsewhere
the factors are widened, which is as exact and slower.
"""

from __future__ import annotations

import torch

_NAMES_DTYPES = hasattr(torch.ops.aten.mm, "dtype_out") and hasattr(torch.ops.aten.addmm, "dtype_out")


def product(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
    """Write `left @ right`.

    Args:
        left: (m, k), floating.
        right: (k, n), same dtype.
        out: (m, n), floating, rows of unit stride.
    """
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    elif _can_widen(left, out):
        torch.ops.aten.mm.dtype_out(left, right, out.dtype, out=out)
    elif out.element_size() > left.element_size():
        torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)
    else:
        out.copy_(left @ right)


def add_product(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
    """Add `left @ right` to `out`, in place.

    Args:
        left: (m, k), floating.
        right: (k, n), same dtype.
        out: (m, n), the dtype of the factors or a wider one, rows of unit stride.
    """
    if out.dtype == left.dtype:
        torch.addmm(out, left, right, out=out)
    elif _can_widen(left, out):
        torch.ops.aten.addmm.dtype_out(out, left, right, out.dtype, out=out)
    else:
        out.addmm_(left.to(out.dtype), right.to(out.dtype))


def _can_widen(factor: torch.Tensor, result: torch.Tensor) -> bool:
    return _NAMES_DTYPES and factor.is_cuda and result.dtype == torch.float32
