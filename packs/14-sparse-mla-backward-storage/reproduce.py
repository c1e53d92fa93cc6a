"""P and dP of the SparseMLA backward in bf16: can they be stored in float32, and what would it buy?

No overlay. The claims are that storing them in float32 does not compile, that storing each as two bf16 numbers does, and
that the error of bf16 does not grow with the context. Both other forms of the kernel are made here from the installed
file. Lowering needs tilelang and no GPU; it runs in a process of its own, since a compiler may abort.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from megacpp_overlays.model import Target
from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

PACKAGE = "megatron.core.transformer.experimental_attention_variant.ops"
MODULE = f"{PACKAGE}.tilelang_sparse_mla_bwd"
FUNCTION = "bwd"
STORED = {"P_shared_cast": "acc_p", "dP_shared_cast": "acc_dp"}
"""The two buffers, and what is copied into each."""
PRODUCTS = 5
"""`T.gemm` that take one of the buffers."""
HEADS, VALUE, TAIL, TOPK = 64, 512, 64, 64
"""The sizes that the kernel is lowered for: heads, channels of values, further channels of keys, chosen keys."""
_MOST = 4096
"""Keys of the longest context that is measured."""


# The other forms of the kernel


def in_float32(text: str) -> str:
    """Return the file with both buffers in float32.

    Raises:
        TargetAbsent: the kernel is not there, or not as it was read.
    """
    tree = ast.parse(text)
    for allocation in _allocations(_kernel(tree)).values():
        allocation.args[1] = ast.Name("accum_dtype", ast.Load())
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def in_two_parts(text: str) -> str:
    """Return the file with each buffer beside another one of its type, for what the first one lost, and both multiplied.

    Raises:
        TargetAbsent: as `in_float32`.
    """
    tree = ast.parse(text)
    kernel = _kernel(tree)
    _allocations(kernel)
    done = {"copies": 0, "products": 0}
    for node in ast.walk(kernel):
        for block in (getattr(node, name, None) for name in ("body", "orelse")):
            if isinstance(block, list):
                block[:] = [new for statement in block for new in (statement, *_beside(statement, done))]
    if done != {"copies": len(STORED), "products": PRODUCTS}:
        raise TargetAbsent(f"{FUNCTION} is not the kernel that was read: {done}")
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _beside(statement: ast.stmt, done: dict[str, int]) -> list[ast.stmt]:
    """Return what comes after a statement that allocates, fills or multiplies one of the buffers."""
    text = ast.unparse(statement)
    for stored, source in STORED.items():
        low = f"{stored}_low"
        if text.startswith(f"{stored} = "):
            return ast.parse(text.replace(stored, low, 1)).body
        if text == f"T.copy({source}, {stored})":
            done["copies"] += 1
            kept = f"T.cast(T.cast({source}[i, j], dtype), accum_dtype)"
            return ast.parse(f"for i, j in T.Parallel(block_H, BS):\n    {low}[i, j] = {source}[i, j] - {kept}\n").body
        if text.startswith(f"T.gemm({stored}, "):
            done["products"] += 1
            return ast.parse(text.replace(stored, low, 1).replace(", clear_accum=True", "")).body
    return []


def _kernel(tree: ast.Module) -> ast.FunctionDef:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == FUNCTION:
            return node
    raise TargetAbsent(f"there is no {FUNCTION}")


def _allocations(kernel: ast.FunctionDef) -> dict[str, ast.Call]:
    """Return the calls that allocate the buffers."""
    found = {
        node.targets[0].id: node.value
        for node in ast.walk(kernel)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call)
        if node.targets[0].id in STORED and ast.unparse(node.value) == "T.alloc_shared([block_H, BS], dtype)"
    }
    if set(found) != set(STORED):
        raise TargetAbsent(f"{FUNCTION} does not allocate {' and '.join(STORED)} in its own type")
    return found


FORMS: dict[str, Callable[[str], str]] = {"stock": str, "float32": in_float32, "parts": in_two_parts}


# Lowering


class Lowered(NamedTuple):
    """What came of lowering one form: source of a GPU program, or the reason why there is none."""

    source: str
    reason: str


def _lowered() -> Behaviour:
    if importlib.util.find_spec("tilelang") is None:
        raise Blocked("tilelang is not installed")
    found = {form: _lower_apart(form) for form in FORMS}
    for form, (source, reason) in found.items():
        print(f"{form}: {reason or f'{len(source)} characters'}")
    text = {form: "compiles" if source else f"is refused: {_first(reason)}" for form, (source, reason) in found.items()}
    refused = re.search(r"same dtype|[Mm]ixed.dtype|dtype mismatch", found["float32"].reason)
    holds = bool(found["stock"].source and found["parts"].source and refused)
    seen = f"lowered for sm_90a: as it is it {text['stock']}; with both buffers in float32 it {text['float32']}; "
    return Behaviour(broken=not holds, seen=seen + f"with each as two bf16 numbers it {text['parts']}")


def _first(reason: str) -> str:
    return " ".join(reason.split())[:160]


def _lower_apart(form: str) -> Lowered:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, __file__, form, str(answer)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
        if not answer.exists():
            return Lowered("", f"the process died with {done.returncode}: {done.stderr[-400:]}")
        kind, *text = json.loads(answer.read_text())
    if kind == "absent":
        raise TargetAbsent(text[0])
    if kind == "blocked":
        raise Blocked(text[0])
    return Lowered(*text)


def _answer(form: str) -> tuple[str, ...]:
    """Lower a form in this process."""
    try:
        module = _load(form)
        return ("lowered", _lower(vars(module)[FUNCTION], HEADS, VALUE, TAIL, TOPK), "")
    except TargetAbsent as error:
        return ("absent", str(error))
    except Blocked as error:
        return ("blocked", str(error))
    except Exception as error:  # noqa: BLE001 - however the compiler refuses is the answer
        return ("lowered", "", f"{type(error).__name__}: {error}")


def _load(form: str) -> Any:
    """Return the installed module, or one that was made from it under a name of its own beside it."""
    try:
        stock = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if error.name is None or not MODULE.startswith(error.name):
            raise
        raise TargetAbsent(f"there is no {error.name}") from error
    if not stock.HAVE_TILELANG:
        raise Blocked("megatron-core cannot import tilelang here")
    text = Path(str(stock.__file__)).read_text()
    if form == "stock":
        _allocations(_kernel(ast.parse(text)))
        return stock
    path = Path(tempfile.mkdtemp(), f"{form}.py")  # tilelang reads the source again when it compiles
    path.write_text(FORMS[form](text))
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{form}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def _lower(function: Any, *sizes: int) -> str:
    """Return what tilelang writes for compute capability 9.0, with the options of the function; compiles no program."""
    import tilelang
    from tilelang import tvm
    from tvm.target import Target as Device

    try:
        device = Device("cuda -arch=sm_90a")
    except Exception:  # noqa: BLE001 - from 0.1.12 on a target is a table
        device = Device({"kind": "cuda", "arch": "sm_90a"})
    options = {str(getattr(key, "value", key)): value for key, value in (function.pass_configs or {}).items()}
    with tvm.transform.PassContext(opt_level=3, config=options), device:
        made = tilelang.lower(
            function.get_tir(*sizes), target=device, enable_host_codegen=False, enable_device_compile=False
        )
    return str(made.kernel_source)


# What it would buy


class Errors(NamedTuple):
    """Relative errors of the gradient of keys and values against float64 (Frobenius norm)."""

    bf16: float
    parts: float
    float32: float
    returned: tuple[float, float]
    """Of bf16 and of parts, with the result rounded to bf16, as the backward pass returns it."""


def _numbers() -> Behaviour:
    """Compute what the kernel computes, in float32 on the CPU, with P and dP rounded in each way."""
    rows = {keys: _errors(keys) for keys in (256, 1024, _MOST)}
    seen = "; ".join(
        f"{keys} keys: bf16 {row.bf16:.1e}, two parts {row.parts:.1e}, float32 {row.float32:.1e}, "
        f"rounded to bf16 at the end {row.returned[0]:.1e} and {row.returned[1]:.1e}"
        for keys, row in rows.items()
    )
    first, *_, last = rows.values()
    bounded = all(row.bf16 < 2**-8 for row in rows.values())
    grows = last.bf16 > 1.25 * first.bf16
    useless = any(row.parts > row.bf16 / 100 for row in rows.values())
    text = f"relative error of dKV against float64, 64 queries, 8 heads, {VALUE + TAIL} channels: {seen}"
    return Behaviour(broken=grows or useless or not bounded, seen=text)


def _errors(keys: int) -> Errors:
    import torch

    generator = torch.Generator().manual_seed(14)
    queries, heads, channels = 64, 8, VALUE + TAIL
    q, kv, do = (
        torch.randn(*sizes, generator=generator).bfloat16()
        for sizes in ((queries, heads, channels), (keys, channels), (queries, heads, VALUE))
    )

    def gradient(dtype: Any, split: Callable[[Any], tuple[Any, ...]]) -> Any:
        a, b, c = q.to(dtype), kv.to(dtype), do.to(dtype)
        p = torch.softmax(torch.einsum("qhd,kd->qhk", a, b) * channels**-0.5, dim=-1)
        dp = torch.einsum("qhd,kd->qhk", c, b[:, :VALUE])
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * channels**-0.5
        found = torch.zeros_like(b)
        for p_part, ds_part in zip(split(p), split(ds), strict=True):
            found += torch.einsum("qhk,qhd->kd", ds_part, a)
            found[:, :VALUE] += torch.einsum("qhk,qhd->kd", p_part, c)
        return found

    def rounded(value: Any) -> Any:
        return value.bfloat16().to(value.dtype)

    true = gradient(torch.float64, lambda value: (value,))

    def error(found: Any) -> float:
        return float((found.double() - true).norm() / true.norm())

    bf16 = gradient(torch.float32, lambda value: (rounded(value),))
    parts = gradient(torch.float32, lambda value: (rounded(value), rounded(value - rounded(value))))
    float32 = gradient(torch.float32, lambda value: (value,))
    returned = (error(rounded(bf16)), error(rounded(parts)))
    return Errors(error(bf16), error(parts), error(float32), returned)


def _gpu() -> Behaviour:
    """Run the kernel and the one with two parts on a GPU, on the same values."""
    import torch

    if importlib.util.find_spec("tilelang") is None:
        raise Blocked("tilelang is not installed")
    stock, parts = _load("stock"), _load("parts")
    seen, holds = [], True
    for keys in (256, 1024, _MOST):
        given, true = _problem(keys)
        try:
            kernels = [_launch(module, given) for module in (stock, parts)]
            found = [kernel() for kernel in kernels]
            torch.cuda.synchronize()
        except Exception as error:
            raise RuntimeError(f"{keys} keys: {_first(str(error))}") from error
        errors = [[_relative(gradient, true) for gradient in (each, each.bfloat16())] for each in found]
        ratios = []
        for _ in range(20):
            times = [_milliseconds(kernel) for kernel in kernels]
            ratios.append(times[1] / times[0])
        holds &= errors[0][0] < 2**-8 and errors[1][0] < errors[0][0] / 10
        seen.append(
            f"{keys} keys: bf16 {errors[0][0]:.1e}, two parts {errors[1][0]:.1e}, rounded to bf16 at the end "
            f"{errors[0][1]:.1e} and {errors[1][1]:.1e}, time of two parts over one {statistics.median(ratios):.2f}"
        )
    text = "relative error of dKV against float64, the kernel itself, 64 queries, 64 heads, all keys chosen: "
    return Behaviour(broken=not holds, seen=text + "; ".join(seen))


def _problem(keys: int) -> tuple[dict[str, Any], Any]:
    """Return the arguments of the backward pass for 64 queries on a GPU, and the gradient of keys and values."""
    import torch

    generator = torch.Generator().manual_seed(14)
    queries, channels = 64, VALUE + TAIL
    q = torch.randn(1, queries, HEADS, channels, generator=generator).bfloat16().cuda()
    kv = torch.randn(1, keys, 1, channels, generator=generator).bfloat16().cuda()
    do = torch.randn(1, queries, HEADS, VALUE, generator=generator).bfloat16().cuda()
    a, b, c = q[0].double(), kv[0, :, 0].double(), do[0].double()
    scores = torch.einsum("qhd,kd->qhk", a, b) * channels**-0.5
    p = torch.softmax(scores, dim=-1)
    dp = torch.einsum("qhd,kd->qhk", c, b[:, :VALUE])
    delta = (p * dp).sum(-1, keepdim=True)
    ds = p * (dp - delta) * channels**-0.5
    true = torch.einsum("qhk,qhd->kd", ds, a)
    true[:, :VALUE] += torch.einsum("qhk,qhd->kd", p, c)
    indices = torch.full((1, queries, 1, _MOST), -1, dtype=torch.int32, device="cuda")  # one compilation for all
    indices[..., :keys] = torch.arange(keys, dtype=torch.int32, device="cuda")
    lse = (torch.logsumexp(scores, dim=-1) / torch.log(torch.tensor(2.0, dtype=torch.float64))).float()[None]
    return {"q": q, "kv": kv, "do": do, "indices": indices, "lse": lse, "delta": delta[..., 0].float()[None]}, true


def _launch(module: Any, given: dict[str, Any]) -> Callable[[], Any]:
    """Return a call that gives the gradient in float32, before it is rounded to bf16."""
    import torch

    q, kv, do, indices, lse, delta = given.values()
    kernel = vars(module)[FUNCTION](HEADS, VALUE, TAIL, indices.shape[-1])

    def call() -> Any:
        gradient = torch.zeros(kv.shape, dtype=torch.float32, device="cuda")
        kernel(q, kv, do, indices, lse.contiguous(), delta.contiguous(), gradient)
        return gradient[0, :, 0]

    return call


def _relative(found: Any, true: Any) -> float:
    return float((found.double() - true).norm() / true.norm())


def _milliseconds(call: Callable[[], Any]) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


_ABOUT = (Target("megatron-core", MODULE, FUNCTION),)
_COMPILERS = ("megatron-core", "tilelang", "apache-tvm-ffi", "torch")
CASES = (
    Case(
        name="lowering",
        overlay=None,
        claim="float32 beside bf16 is refused by T.gemm, and two bf16 numbers for each value are not",
        about=_ABOUT,
        device="cpu",
        versions=_COMPILERS,
        run=_lowered,
    ),
    Case(
        name="numbers",
        overlay=None,
        claim="the error of bf16 stays below 2^-8 and does not grow with the context, and two parts remove it",
        about=_ABOUT,
        device="cpu",
        versions=("megatron-core", "torch"),
        run=_numbers,
    ),
    Case(
        name="gpu",
        overlay=None,
        claim="the kernel itself has an error below 2^-8, and with two parts a tenth of it at most",
        about=_ABOUT,
        device="cuda",
        versions=_COMPILERS,
        run=_gpu,
    ),
)

if __name__ == "__main__":
    form, answer = sys.argv[1:]
    Path(answer).write_text(json.dumps(_answer(form)))
