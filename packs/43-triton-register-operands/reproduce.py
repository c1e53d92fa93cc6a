"""Are products right whose left operand a kernel makes in registers, in a loop that Triton pipelines, on Hopper?

Matrices hold small integers, so that every sum is exact and one wrong bit is an error.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megacpp_overlays.model import Target
from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

KERNEL = '''
import triton
import triton.language as tl


@triton.jit
def product(a, b, c, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SCALED: tl.constexpr, STAGES: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros([M, N], tl.float32)
    for start in tl.range(0, k, K, num_stages=STAGES):
        inner = start + tl.arange(0, K)
        left = tl.load(a + rows[:, None] * k + inner[None, :])
        right = tl.load(b + inner[:, None] * n + columns[None, :])
        if SCALED:
            left = left.to(tl.float32) * 2 + 1
        total = tl.dot(left.to(right.dtype), right, total)
    tl.store(c + rows[:, None] * n + columns[None, :], total)
'''
"""A product whose left operand is cast, or scaled, where it is loaded. Triton reads the source of a kernel from a file."""
ROWS, COLUMNS, INNER = 1024, 2048, 2048
LAUNCHES = 5


class Shape(NamedTuple):
    """A block of the product, and how it is launched."""

    rows: int
    columns: int
    inner: int
    stages: int
    warps: int
    dtype: str
    """Of the left matrix in memory: `int8` is cast, `bfloat16` is scaled by two and one is added."""

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns} x {self.inner} {self.dtype}, {self.stages} stages, {self.warps} warps"


def shapes() -> Iterator[Shape]:
    """Yield what was wrong with one Triton or more, and the same with four warps where that has room."""
    for dtype in ("int8", "bfloat16"):
        for inner, stages in ((64, 2), (64, 3), (64, 4), (128, 2)):
            for rows, columns in ((64, 128), (64, 256), (128, 256)):
                yield Shape(rows, columns, inner, stages, 8, dtype)
        yield Shape(64, 128, 64, 3, 4, dtype)
        yield Shape(128, 128, 64, 3, 4, dtype)


def kernel() -> Any:
    """Return the kernel.

    Raises:
        Blocked: triton is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        raise Blocked("triton is not installed")
    folder = Path(tempfile.mkdtemp())
    (folder / "register_operands.py").write_text(KERNEL)
    sys.path.insert(0, str(folder))
    return importlib.import_module("register_operands").product


def _code() -> Behaviour:
    """Compile every shape for compute capability 9.0, which needs no GPU, and find where left operands are."""
    product = kernel()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    in_registers, every, groups = 0, list(shapes()), set()
    for shape in every:
        types = {"a": "*i8" if shape.dtype == "int8" else "*bf16", "b": "*bf16", "c": "*fp32", "n": "i32", "k": "i32"}
        constants = dict(zip(("M", "N", "K"), shape, strict=False)) | {
            "SCALED": shape.dtype != "int8",
            "STAGES": shape.stages,
        }
        signature = types | dict.fromkeys(constants, "constexpr")
        aligned = {(index,): [["tt.divisibility", 16]] for index in range(len(types))}
        source = ASTSource(product, signature, constants, aligned)
        options = {"num_warps": shape.warps}
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        in_registers += bool(re.search(r"wgmma\.mma_async[^;]*\}, \{", ptx))
        groups |= set(re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", ptx)) - {"0"}
    waits = ", ".join(sorted(groups, key=int)) or "none"
    seen = f"left operands are in registers in {in_registers} of {len(every)} kernels; groups of products that may be "
    return Behaviour(broken=in_registers != len(every), seen=f"{seen}under way behind a wait: {waits}")


def _gpu() -> Behaviour:
    """Launch every shape several times, and count what is not exact."""
    product = kernel()
    import torch
    import triton

    capability = torch.cuda.get_device_capability()
    if capability[0] != 9:
        raise TargetAbsent(f"this GPU has compute capability {capability[0]}.{capability[1]}, and not 9")
    random = torch.Generator(device="cuda").manual_seed(43)

    def integers(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, device="cuda", generator=random)

    left, right = integers(-3, 4, ROWS, INNER), integers(-1, 2, INNER, COLUMNS)
    exact = {
        "int8": (left.double() @ right.double()).float(),
        "bfloat16": ((2 * left + 1).double() @ right.double()).float(),
    }
    right = right.bfloat16()
    found = torch.empty(ROWS, COLUMNS, device="cuda")
    wrong: dict[Shape, float] = {}
    run = 0
    for shape in shapes():
        given = left.to(getattr(torch, shape.dtype))
        grid = (ROWS // shape.rows, COLUMNS // shape.columns)
        worst = 0
        try:
            for _ in range(LAUNCHES):
                found.fill_(torch.nan)
                product[grid](
                    *(given, right, found, COLUMNS, INNER, *shape[:3], shape.dtype != "int8", shape.stages),
                    num_warps=shape.warps,
                )
                worst = max(worst, int((found != exact[shape.dtype]).sum()))
        except triton.runtime.errors.OutOfResources:
            continue
        run += 1
        if worst:
            wrong[shape] = worst / found.numel()
    with_four = sum(shape.warps == 4 for shape in wrong)
    said = f"Triton {triton.__version__}: wrong in {len(wrong)} of {run} kernels, of these {with_four} with four warps"
    if wrong:
        shape, share = max(wrong.items(), key=lambda each: each[1])
        said += f"; at worst {share:.1%} of the numbers, {shape}"
    return Behaviour(broken=bool(wrong), seen=said)


_ABOUT = (Target("triton", "triton.language.core", "dot"),)
_VERSIONS = ("triton", "torch")
CASES = (
    Case(
        name="machine-code",
        overlay=None,
        claim="Triton gives Hopper's products the left operands of these kernels from registers",
        about=_ABOUT,
        device="cpu",
        versions=_VERSIONS,
        run=_code,
    ),
    Case(name="gpu", overlay="triton-register-operands", device="cuda", versions=_VERSIONS, run=_gpu),
)
