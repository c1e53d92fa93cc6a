"""Does a grouped `T.reduce_sum` add values more than once?

Rows of 192 values are summed in groups of 32. With 128 threads a group does not begin where a tile of threads begins:
what a value's place in its thread is depends on the group. From 0.1.9 to 0.1.12 every thread then adds its own value
once for each value of the group, and the threads' results are added up all the same.

On a CPU the generated CUDA source is read: how many values go into one sum is the number of times that a thread adds,
times the number of threads that are combined. On a GPU the sums are compared with float64.
"""

from __future__ import annotations

import importlib.util
import math
import re
from typing import Any, NamedTuple

from megacpp_overlays.repro import Behaviour, Blocked, Case

ROWS, COLUMNS, GROUPS, THREADS = 2, 192, 6, 128
GROUP = COLUMNS // GROUPS

REFUSALS = ("Not a normalized iterator", "ReduceOp cannot lower a layout")
"""What the compiler says of a layout that it does not take: 0.1.8 and older, and since 0.1.13. Nobody gets a wrong sum."""


def _count() -> Behaviour:
    tilelang = _import_tilelang()
    try:
        # An object, and not a name: how a target is spelled changes between releases. The context is for 0.1.8 and 0.1.9.
        with tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}) as target:
            source = tilelang.lower(_grouped_sum(), target=target).kernel_source
    except Exception as error:
        return Behaviour(broken=False, seen=f"{_what()} is refused: {_refusal(error)}")
    found = sums(source)
    if len(found) != 1 or found[0].values % GROUP:
        raise RuntimeError(f"the generated source has other sums than expected: {found}")
    (one,) = found
    seen = (
        f"{_what()}: each thread adds {one.local} times and {one.threads} threads are combined, "
        f"so a sum has {one.values} summands for {GROUP} values"
    )
    return Behaviour(broken=one.values != GROUP, seen=seen)


def _run() -> Behaviour:
    tilelang = _import_tilelang()
    import torch

    values = torch.arange(1, ROWS * COLUMNS + 1, dtype=torch.float32, device="cuda").reshape(ROWS, COLUMNS)
    right = values.double().reshape(ROWS, GROUPS, GROUP).sum(dim=2)
    try:
        sums = tilelang.compile(_grouped_sum(), out_idx=[1])(values)
    except Exception as error:
        return Behaviour(broken=False, seen=f"{_what()} is refused: {_refusal(error)}")
    ratios = sums.double() / right
    low, high = float(ratios.min()), float(ratios.max())
    wrong = int(((ratios - 1).abs() > 1e-6).sum())
    seen = f"{_what()} on the GPU: {wrong} of {ratios.numel()} sums are wrong, sum over float64 sum {low:.6f} to {high:.6f}"
    return Behaviour(broken=wrong > 0, seen=seen)


def _what() -> str:
    return f"({ROWS}, {COLUMNS}) summed in groups of {GROUP} by {THREADS} threads"


def _grouped_sum() -> Any:
    import tilelang.language as T

    def program(values: T.Tensor((ROWS, COLUMNS), "float32"), out: T.Tensor((ROWS, GROUPS), "float32")):
        with T.Kernel(1, threads=THREADS):
            rows = T.alloc_fragment((ROWS, COLUMNS), "float32")
            sums = T.alloc_fragment((ROWS, GROUPS), "float32")
            for i, j in T.Parallel(ROWS, COLUMNS):
                rows[i, j] = values[i, j]
            T.reduce_sum(T.reshape(rows, (ROWS, GROUPS, GROUP)), sums, dim=2)
            for i, j in T.Parallel(ROWS, GROUPS):
                out[i, j] = sums[i, j]

    return T.prim_func(program)


def _refusal(error: Exception) -> str:
    """Return what the compiler refused, in a few words.

    Raises:
        Exception: it failed in another way.
    """
    text = next((text for text in REFUSALS if text in str(error)), None)
    if text is None:
        raise error
    return text


class Sum(NamedTuple):
    """A sum in generated CUDA source."""

    name: str
    local: int
    """How often a thread adds a value of its own."""
    threads: int
    """Threads whose results are combined; 1 where none are."""

    @property
    def values(self) -> int:
        return self.local * self.threads


_LOOP = re.compile(r"for \(int (\w+) = 0; \1 < (\d+); \+\+\1\) \{")
_CLEARED = re.compile(r"(\w+)\[.*?\] = 0x0p\+0f")
_ADDED = re.compile(r"(\w+)\[(.*?)\] = \(\1\[\2\] \+ ")
_COMBINED = re.compile(r"(\w+)\[(.*?)\] = tl::AllReduce<tl::SumOp, (\d+), (\d+)")


def sums(source: str) -> list[Sum]:
    """Return the sums that the threads of a kernel combine, in the order of its source.

    A sum begins where it is cleared. Loops named `rv` run over the summed axis, others over the sums.
    """
    found: list[Sum] = []
    added: dict[str, int] = {}
    combined: dict[str, int] = {}
    loops: list[int] = []
    for line in map(str.strip, source.splitlines()):
        if loop := _LOOP.match(line):
            loops.append(int(loop[2]) if loop[1].startswith("rv") else 1)
        elif line.endswith("{"):
            loops.append(1)
        elif line.startswith("}"):
            del loops[-1:]
        elif cleared := _CLEARED.match(line):
            found += _closed(cleared[1], added, combined)
        elif parts := _COMBINED.match(line):
            combined[parts[1]] = combined.get(parts[1], 1) * (int(parts[3]) // int(parts[4]))
        elif adding := _ADDED.match(line):
            added[adding[1]] = added.get(adding[1], 0) + math.prod(loops)
    return found + [each for name in list(combined) for each in _closed(name, added, combined)]


def _closed(name: str, added: dict[str, int], combined: dict[str, int]) -> list[Sum]:
    """Take a sum out of the books; without combined threads it is none of these."""
    local, threads = added.pop(name, 0), combined.pop(name, 0)
    return [Sum(name, local, threads)] if threads else []


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


_GATE = "tilelang-grouped-reduce"
_VERSIONS = ("tilelang", "apache-tvm-ffi", "z3-solver")
CASES = (
    Case(name="grouped-sum-source", overlay=_GATE, device="cpu", versions=_VERSIONS, run=_count),
    Case(name="grouped-sum-gpu", overlay=_GATE, device="cuda", versions=(*_VERSIONS, "torch"), run=_run),
)
