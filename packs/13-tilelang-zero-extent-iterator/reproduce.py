"""Does layout inference divide by zero where a fragment is spread over columns that are no power of two?

Ten lines of TileLang are compiled to CUDA source for sm_90a. This needs no GPU and runs nothing.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case

ROWS, THREADS = 32, 128
POWER_OF_TWO = 32
"""Columns with which every release compiles."""
COLUMNS = (24, 48, 96)


def _lower() -> Behaviour:
    tilelang = _import_tilelang()
    if (problem := _error(tilelang, POWER_OF_TWO)) is not None:
        raise RuntimeError(f"{POWER_OF_TWO} columns do not compile either: {problem}")
    problems = {columns: problem for columns in COLUMNS if (problem := _error(tilelang, columns)) is not None}
    if others := {columns: text for columns, text in problems.items() if "Divide by zero" not in text}:
        raise RuntimeError(f"another failure: {others}")
    bad = ", ".join(map(str, problems))
    good = ", ".join(str(columns) for columns in (POWER_OF_TWO, *COLUMNS) if columns not in problems)
    seen = f"({ROWS}, columns) with {THREADS} threads for sm_90a: {good} columns compile"
    return Behaviour(broken=bool(problems), seen=f"{seen}, {bad} end in Divide by zero" if bad else seen)


def _error(tilelang: Any, columns: int) -> str | None:
    """Return the last line of what stops the compiler, or None."""
    try:
        # An object, and not a name: how a target is spelled changes between releases. The context is for 0.1.8 and 0.1.9.
        with tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}) as target:
            tilelang.lower(_spread(columns), target=target)
    except Exception as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return None


def _spread(columns: int) -> Any:
    import tilelang.language as T

    def program(one: T.Tensor((columns,), "float32"), out: T.Tensor((ROWS, columns), "float32")):
        with T.Kernel(1, threads=THREADS):
            row = T.alloc_fragment((columns,), "float32")
            tile = T.alloc_fragment((ROWS, columns), "float32")
            T.copy(one, row)
            for i, j in T.Parallel(ROWS, columns):
                tile[i, j] = row[j]
            T.copy(tile, out)

    return T.prim_func(program)


def _import_tilelang() -> Any:
    """Import TileLang.

    Raises:
        Blocked: it is not here, or its libraries do not load here.
    """
    if importlib.util.find_spec("tilelang") is None:
        raise Blocked("tilelang is not installed")
    try:
        import tilelang
    except (ImportError, OSError) as error:
        raise Blocked(f"tilelang does not load here: {error}") from error
    return tilelang


CASES = (
    Case(
        name="spread-row",
        overlay="tilelang-zero-extent-iterator",
        device="cpu",
        versions=("tilelang", "apache-tvm-ffi", "z3-solver"),
        run=_lower,
    ),
)
