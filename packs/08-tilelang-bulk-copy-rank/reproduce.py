"""Does the Mamba-3 MIMO backward compile with the TMA lowering that its own switch asks for?

Both kernels of the backward switch TMA lowering off. Up to 0.1.8 TileLang ends the compilation when a TMA copy meets
shared memory of three axes whose layout is not linear, which these kernels have. Here the first of them is lowered to
CUDA source for sm_90a, as it is configured and with the switch turned. This needs no GPU and runs nothing.

What the gate is about is TMA lowering that is on, with a TileLang that cannot do it. Where TMA lowering is off, as it
is published, and turning it on would end the compilation, the combination is absent.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from megacpp_overlays.model import Target
from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

REFUSAL = "InputDim() == 2"
"""The check that fails, in 0.1.6.post1 to 0.1.8."""
FILES = ("src/op/copy.cc", "src/backend/cuda/op/copy.cc", "src/cuda/op/copy.cc")
"""Where it is looked for below the package: where copies were lowered up to 0.1.9, in 0.1.10, and since."""
CHECK = f'{REFUSAL}) << "Cannot detect TMA layout."'
SWITCH = "tl.disable_tma_lower"
MODULE = "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd"
SHAPE = {"N": 64, "P": 64, "R": 4, "chunk_size": 16}


def _three_axes() -> Behaviour:
    """Compare what the C++ beside the modules checks with what a copy of three axes meets."""
    tilelang = _import_tilelang()
    files = [Path(str(tilelang.__file__)).parent / name for name in FILES]
    there = [file for file in files if file.exists()]
    if not there:
        raise Blocked(f"this tilelang ships none of {', '.join(FILES)}")
    checks = any(CHECK in file.read_text(errors="replace") for file in there)
    problem = _error(tilelang, _copied(), {SWITCH: False, "tl.disable_warp_specialized": True})
    seen = (
        f"the check for two axes is {'' if checks else 'not '}in {there[0].name}; "
        f"a copy of three axes into swizzled shared memory, TMA lowering on: {problem or 'compiles'}"
    )
    return Behaviour(broken=checks != (problem is not None), seen=seen)


def _backward() -> Behaviour:
    tilelang = _import_tilelang()
    kernel = _kernel()
    program = kernel.get_tir(**_arguments(kernel))
    named = {getattr(key, "value", key): value for key, value in kernel.pass_configs.items()}
    published = "off" if named.get(SWITCH, False) else "on"
    what = f"mamba_mimo_bwd_fwd for sm_90a, published with TMA lowering {published}"
    if (refused := _error(tilelang, program, {**named, SWITCH: False})) is None:
        return Behaviour(broken=False, seen=f"{what}: on it compiles")
    if published == "off":
        raise TargetAbsent(f"{what}: on it {refused}")
    if (problem := _error(tilelang, program, {**named, SWITCH: True})) is not None:
        raise RuntimeError(f"mamba_mimo_bwd_fwd does not compile with TMA lowering off either: {problem}")
    return Behaviour(broken=True, seen=f"{what}: off it compiles, on it {refused}")


def _error(tilelang: Any, program: Any, configuration: dict[str, Any]) -> str | None:
    """Return the check that ends the compilation, or None.

    Raises:
        Exception: it failed in another way.
    """
    # An object, and not a name: how a target is spelled changes between releases. The context is for 0.1.8 and 0.1.9.
    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    try:
        with target, tilelang.tvm.transform.PassContext(opt_level=3, config=configuration):
            tilelang.lower(program, target=target)
    except Exception as error:
        if REFUSAL not in str(error):
            raise
        return "stops at the check for two axes (InputDim() == 2)"
    return None


def _kernel() -> Any:
    """Import the kernel, without what the package imports for Mamba-1.

    Raises:
        Blocked: mamba-ssm, or something that the kernel does need, is not here.
        TargetAbsent: this mamba-ssm has no MIMO kernels.
    """
    spec = importlib.util.find_spec("mamba_ssm")
    if spec is None:
        raise Blocked("mamba-ssm is not installed")
    package = ModuleType("mamba_ssm")
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["mamba_ssm"] = package
    if importlib.util.find_spec("einops") is None:
        sys.modules["einops"] = ModuleType("einops")
        sys.modules["einops"].rearrange = sys.modules["einops"].repeat = None  # only its own references use them
    if importlib.util.find_spec("mamba_ssm.ops.tilelang") is None:
        raise TargetAbsent("this mamba-ssm has no TileLang kernels")
    try:
        return importlib.import_module(MODULE).mamba_mimo_bwd_fwd
    except ImportError as error:
        raise Blocked(f"the kernels cannot be imported: {error}") from error


def _arguments(kernel: Any) -> dict[str, Any]:
    """Return the arguments of the kernel factory: what it is compiled for; what has a default keeps it."""
    known = {"B": 1, "S": 64, "H": 4, "G": 1, "hasZ": True, "hasD": True, "reduceO": True, "dtype": "bfloat16", **SHAPE}
    known |= {"rotary_dim_divisor": 4, "fuse_pregate_headwise_rms_norm": False}
    parameters = inspect.signature(kernel.func).parameters
    unknown = [
        name for name, each in parameters.items() if name not in known and each.default is inspect.Parameter.empty
    ]
    if unknown:
        raise TargetAbsent(f"this kernel has other arguments: {', '.join(unknown)}")
    return {name: known[name] for name in parameters if name in known}


def _copied() -> Any:
    import tilelang
    import tilelang.language as T

    steps, rank, width = 16, 4, 64

    def program(
        values: T.Tensor((steps, rank, width), "bfloat16"), out: T.Tensor((steps * rank, steps * rank), "float32")
    ):
        with T.Kernel(1, threads=128):
            flat = T.alloc_shared((steps * rank, width), "bfloat16")
            product = T.alloc_fragment((steps * rank, steps * rank), "float32")
            T.annotate_layout({flat: tilelang.layout.make_swizzled_layout(flat)})
            T.copy(values, T.view(flat, shape=[steps, rank, width]))
            T.gemm(flat, flat, product, transpose_B=True, clear_accum=True)
            T.copy(product, out)

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


_VERSIONS = ("mamba-ssm", "tilelang", "apache-tvm-ffi", "z3-solver", "triton")
CASES = (
    Case(
        name="three-axes",
        overlay=None,
        claim="a TMA copy of three axes is refused where the C++ checks for two, and nowhere else",
        about=(Target("tilelang", "tilelang.transform", "LowerTileOp"),),
        device="cpu",
        versions=_VERSIONS,
        run=_three_axes,
    ),
    Case(name="mimo-backward", overlay="tilelang-bulk-copy-rank", device="cpu", versions=_VERSIONS, run=_backward),
)
