"""Made-up sources with the shapes that the reproducers of packs 4, 7 and 14 change, and functions that run them.

They are run on arrays of numpy, element by element, so that a changed source can be compared with its original.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

# Pack 4


def siso(uses: int) -> str:
    """Return a kernel that writes the product so many times, the last one in a loop of its own block."""
    lines = ["def mamba3_siso_bwd_kernel_dqkv(tl, v_block, do_block, found):", "    for chunk in range(2):"]
    for use in range(uses):
        lines += [f"        x{use} = tl.dot(v_block, tl.trans(do_block))", f"        x{use} *= {use + 2} + chunk"]
    lines += ["        other = tl.dot(do_block, tl.trans(v_block))"]
    lines += [f"        found.append(({', '.join(f'x{use}' for use in range(uses))}, other))"]
    return "\n".join(lines) + "\n"


def run_siso(text: str) -> tuple[list[Any], int]:
    """Return the results of a kernel, and the number of products that it computed."""
    calls: list[int] = []

    def dot(a: Any, b: Any) -> Any:
        calls.append(1)
        return a * b

    scope: dict[str, Any] = {}
    exec(text, scope)
    found: list[Any] = []
    # Numbers, since a tile of Triton, too, is a value: `x *= y` makes another one.
    scope["mamba3_siso_bwd_kernel_dqkv"](SimpleNamespace(dot=dot, trans=lambda x: x + 0.5), 1.25, -3.5, found)
    return found, len(calls)


# Pack 7

MIMO = """
def mamba_mimo_bwd_fwd(B, S, H, G, N, R, chunk_size, dtype, i_b, i_h, i_h_qk):
    fused_chunk_size = chunk_size * R

    def kernel(
        Q: T.Tensor([B, S, R, G, N], dtype), K: T.Tensor([B, S, R, G, N], dtype), BIAS,
        QK_DOT: T.Tensor([B, H, S, R, R], dtype),
    ):
        q_shared = T.alloc_shared([fused_chunk_size, N], dtype)
        k_shared = T.alloc_shared([fused_chunk_size, N], dtype)
        for i in range(S // chunk_size):
            chunk_start = i * chunk_size
            fused_chunk_start = chunk_start * R
            q_view = T.view(q_shared, shape=[chunk_size, R, N])
            T.copy(Q[i_b, chunk_start:chunk_start + chunk_size, :, i_h_qk, :], q_view)
            q_frag = T.alloc_fragment([chunk_size, R, N], dtype)
            T.copy(q_view, q_frag)
            for cs, r, n in T.Parallel(chunk_size, R, N):
                q_frag[cs, r, n] += BIAS[r, n]
            T.copy(q_frag, q_view)
            k_view = T.view(k_shared, shape=[chunk_size, R, N])
            T.copy(K[i_b, chunk_start:chunk_start + chunk_size, :, i_h_qk, :], k_view)
            k_frag = T.alloc_fragment([chunk_size, R, N], dtype)
            T.copy(k_view, k_frag)
            for cs, r, n in T.Parallel(chunk_size, R, N):
                k_frag[cs, r, n] += 2 * BIAS[r, n]
            T.copy(k_frag, k_view)
            for cs, r_out, r_in in T.Parallel(chunk_size, R, R):
                QK_DOT[i_b, i_h, chunk_start + cs, r_out, r_in] = q_shared[cs * R + r_out, 0] * k_shared[cs * R + r_in, 1]
    return kernel


def mamba_mimo_bwd_bwd(B, S, H, G, N, R, chunk_size, dtype, i_b, i_h, i_h_qk):
    fused_chunk_size = chunk_size * R

    def kernel(
        Q: T.Tensor([B, S, R, G, N], dtype), K: T.Tensor([B, S, R, G, N], dtype), BIAS,
        QK_DOT: T.Tensor([B, H, S, R, R], dtype), OUT, GAMMA,
    ):
        q_shared = T.alloc_shared([fused_chunk_size, N], dtype)
        k_pre_shared = T.alloc_shared([fused_chunk_size, N], dtype)
        qk_dot_shared = T.alloc_shared([chunk_size, R, R], dtype)
        for i in range(S // chunk_size):
            chunk_start = i * chunk_size
            fused_chunk_start = chunk_start * R
            for cs, r, n in T.Parallel(chunk_size, R, N):
                q_shared[cs * R + r, n] = Q[i_b, chunk_start + cs, r, i_h_qk, n]
            q_frag = T.alloc_fragment([chunk_size, R, N], dtype)
            for cs, r, n in T.Parallel(chunk_size, R, N):
                q_frag[cs, r, n] = q_shared[cs * R + r, n]
            for cs, r, n in T.Parallel(chunk_size, R, N):
                q_frag[cs, r, n] += BIAS[r, n]
            for cs, r, n in T.Parallel(chunk_size, R, N):
                q_shared[cs * R + r, n] = q_frag[cs, r, n]
            k_view = T.view(k_pre_shared, shape=[chunk_size, R, N])
            T.copy(K[i_b, chunk_start:chunk_start + chunk_size, :, i_h_qk, :], k_view)
            k_frag = T.alloc_fragment([chunk_size, R, N], dtype)
            T.copy(k_view, k_frag)
            for cs, r, n in T.Parallel(chunk_size, R, N):
                k_frag[cs, r, n] += BIAS[r, n]
            T.copy(k_frag, k_view)
            qk_dot_frag = T.alloc_fragment([chunk_size, R, R], dtype)
            T.copy(QK_DOT[i_b, i_h, chunk_start:chunk_start + chunk_size, :, :], qk_dot_shared)
            T.copy(qk_dot_shared, qk_dot_frag)
            for csr, n in T.Parallel(fused_chunk_size, N):
                cs = csr // R
                for r_out in range(R):
                    OUT[chunk_start * R + csr, n] += (
                        q_shared[csr, n] * qk_dot_frag[cs, r_out, csr % R] * k_view[cs, r_out, n]
                    )
            gamma_frag = T.alloc_fragment([chunk_size, R, R], dtype)
            T.copy(qk_dot_shared, gamma_frag)
            for cs, r_out, r_in in T.Parallel(chunk_size, R, R):
                gamma_frag[cs, r_out, r_in] *= q_shared[cs * R + r_out, 0] - k_pre_shared[cs * R + r_in, 1]
            T.copy(T.view(gamma_frag, shape=[chunk_size, R * R]), GAMMA[chunk_start:chunk_start + chunk_size])
    return kernel
"""


def run_mimo(text: str, *, flat: bool, squares: bool = True) -> tuple[Any, ...]:
    """Return the results of both kernels, with inputs in the form that they take: flat, or in the original shapes."""
    scope: dict[str, Any] = {"T": _tiles()}
    exec(text, scope)
    sizes = {"B": 2, "S": 6, "H": 4, "G": 2, "N": 5, "R": 2, "chunk_size": 3, "dtype": float}
    where = {"i_b": 1, "i_h": 3, "i_h_qk": 1}
    batch, length, heads, groups, width, rank = (sizes[name] for name in "BSHGNR")
    values = np.random.default_rng(7)
    q, k = values.normal(size=(2, batch, length, rank, groups, width))
    bias = values.normal(size=(rank, width))
    dots = np.zeros((batch, heads, length, rank, rank))
    out, gamma = np.zeros((length * rank, width)), np.zeros((length, rank * rank))
    given = dots
    if flat:
        q, k = (each.reshape(batch, length * rank, groups, width) for each in (q, k))
        given = dots.reshape(batch, heads, length, rank * rank) if squares else dots
    scope["mamba_mimo_bwd_fwd"](**sizes, **where)(q, k, bias, given)
    scope["mamba_mimo_bwd_bwd"](**sizes, **where)(q, k, bias, given, out, gamma)
    return dots, out, gamma


# Pack 14

SPARSE = """
def bwd(block_H, BS, dtype, accum_dtype, acc_p, acc_dp, KV, KV_tail, Q, dO, Q_tail):
    P_shared_cast = T.alloc_shared([block_H, BS], dtype)
    dP_shared_cast = T.alloc_shared([block_H, BS], dtype)
    acc_dq = T.alloc_fragment([block_H, KV.shape[1]], accum_dtype)
    acc_dq_tail = T.alloc_fragment([block_H, KV_tail.shape[1]], accum_dtype)
    acc_dkv = T.alloc_fragment([BS, Q.shape[1]], accum_dtype)
    acc_dkv_tail = T.alloc_fragment([BS, Q_tail.shape[1]], accum_dtype)
    acc_dkv[:] = 7
    for step in range(2):
        T.copy(acc_p, P_shared_cast)
        T.copy(acc_dp, dP_shared_cast)
        T.gemm(dP_shared_cast, KV, acc_dq)
        T.gemm(dP_shared_cast, KV_tail, acc_dq_tail)
        T.gemm(dP_shared_cast, Q, acc_dkv, transpose_A=True, clear_accum=True)
        T.gemm(P_shared_cast, dO, acc_dkv, transpose_A=True)
        T.gemm(dP_shared_cast, Q_tail, acc_dkv_tail, transpose_A=True)
    return acc_dq, acc_dq_tail, acc_dkv, acc_dkv_tail
"""


def run_sparse(text: str, *, stored: Any) -> list[float]:
    """Return how far the four results of a kernel are from those with everything in float64, relative to their norms.

    Args:
        text: the kernel.
        stored: the type of the values that it stores; products are computed in float64.
    """
    values = np.random.default_rng(14)
    p, dp, q, do = (values.normal(size=(8, 6)) for _ in range(4))
    kv, kv_tail, q_tail = (values.normal(size=size) for size in ((6, 5), (6, 2), (8, 2)))

    def results(dtype: Any) -> Any:
        scope: dict[str, Any] = {"T": _tiles()}
        exec(text, scope)
        return scope["bwd"](8, 6, dtype, np.float64, p, dp, kv, kv_tail, q, do, q_tail)

    true = results(np.float64)
    return [
        float(np.linalg.norm(each - other) / np.linalg.norm(other))
        for each, other in zip(results(stored), true, strict=True)
    ]


def _tiles() -> SimpleNamespace:
    """Return the namespace `T` of a kernel, on arrays of numpy."""

    def allocate(sizes: list[int], dtype: Any) -> Any:
        return np.zeros(sizes, dtype)

    def copy(source: Any, destination: Any) -> None:
        destination[...] = np.reshape(source, destination.shape)

    def parallel(*sizes: int) -> Iterator[tuple[int, ...]]:
        return itertools.product(*map(range, sizes))

    def gemm(a: Any, b: Any, sum_: Any, *, transpose_A: bool = False, clear_accum: bool = False) -> None:  # noqa: N803
        sum_[...] = (0 if clear_accum else sum_) + (a.T if transpose_A else a).astype(sum_.dtype) @ b

    return SimpleNamespace(
        Tensor=lambda *_: None,
        alloc_shared=allocate,
        alloc_fragment=allocate,
        view=lambda array, shape: array.reshape(shape),
        copy=copy,
        cast=lambda value, dtype: dtype(value),
        Parallel=parallel,
        gemm=gemm,
    )
