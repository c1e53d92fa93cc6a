"""Compile the Mamba-3 MIMO backward with TileLang, and hold the sums that newer compilers refuse to float64.

Since 0.1.13 TileLang refuses a sum over a flattened matrix product: it cannot prove that what a thread holds does not
depend on which thread it is. The second kernel of the MIMO backward has such sums. On a CPU that of packed
sequences is lowered to CUDA source for sm_90a; where that succeeds, the source is asked how many values go into each sum. On a GPU every sum
is compared with float64.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from megacpp_overlays.model import Target
from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

REFUSAL = "ReduceOp cannot lower a layout"
STATE, HEAD, RANK, CHUNK = 64, 64, 4, 16
"""What is lowered: the chunk is what Mamba-3 asks for with rank 4, the state half of its default so that it is quicker."""
PACKAGE = "mamba_ssm.ops.tilelang.mamba3"


# On a CPU


def _flattened_product() -> Behaviour:
    """Sum a product of matrices over its columns and over blocks of four rows, and as a whole."""
    tilelang = _import_tilelang()
    _mamba_package()
    said = {}
    for what, blocks in (("in blocks of rows", CHUNK), ("as a whole", 1)):
        try:
            found = sums(_lower(tilelang, _summed_product(blocks), {}))
        except Exception as error:
            said[what] = _refused(error)
        else:
            expected = CHUNK * RANK * STATE // blocks
            if [each.values for each in found] != [expected]:
                raise RuntimeError(f"{what}: {found}, and not {expected} values in one sum")
            said[what] = f"compiles, {expected} values in a sum"
    seen = "; ".join(f"summed {what}: {text}" for what, text in said.items())
    return Behaviour(broken=any(REFUSAL in text for text in said.values()), seen=seen)


def _summed_product(blocks: int) -> Any:
    import tilelang.language as T

    rows, inner, dtype = CHUNK * RANK, 64, "bfloat16"

    def program(
        left: T.Tensor((rows, inner), dtype), right: T.Tensor((STATE, inner), dtype), out: T.Tensor((blocks,), "float32")
    ):
        with T.Kernel(1, threads=256):
            a = T.alloc_shared((rows, inner), dtype)
            b = T.alloc_shared((STATE, inner), dtype)
            product = T.alloc_fragment((rows, STATE), "float32")
            summed = T.alloc_fragment((blocks,), "float32")
            T.copy(left, a)
            T.copy(right, b)
            T.gemm(a, b, product, transpose_B=True, clear_accum=True)
            T.reduce_sum(T.view(product, shape=[blocks, rows * STATE // blocks]), summed, dim=1, clear=True)
            T.copy(summed, out)

    return T.prim_func(program)


def _varlen_backward() -> Behaviour:
    """Lower the second kernel of the backward as it is, with its own pass configuration."""
    module = "mamba3_mimo_bwd_varlen"
    tilelang = _import_tilelang()
    kernel = _kernels(module).mamba_mimo_bwd_bwd
    what = f"{module}.mamba_mimo_bwd_bwd (state {STATE}, head {HEAD}, rank {RANK}, chunk {CHUNK}) for sm_90a"
    try:
        source = _lower(tilelang, kernel.get_tir(**_arguments(kernel)), kernel.pass_configs)
    except Exception as error:
        return Behaviour(broken=True, seen=f"{what}: {_refused(error)}")
    found = sums(source)
    wrong = [each for each in found if SUMMED.get(each.name.removesuffix("_clear").removesuffix("_reshaped")) != each.values]
    if not found or wrong:
        raise RuntimeError(f"{what}: these sums have another number of values, or none has a name that is known: {wrong}")
    counts = ", ".join(f"{each.name} {each.values}" for each in found)
    return Behaviour(broken=False, seen=f"{what} compiles; values in its sums, all as they should be: {counts}")


SUMMED = {
    "dD_frag": CHUNK * RANK * HEAD,
    "dgamma_diag_reduced_frag": RANK * RANK,
    "ddA_state_kv_frag": RANK * STATE,
    "interchunk_dda_prereduce_frag": RANK,
    "interchunk_dda_frag": RANK,
    "dfactor_frag": RANK * STATE,
    "ddA_state_passing": STATE * HEAD,
    "dda_cs_frag": RANK * STATE,
}
"""How many values each sum of the kernel should have."""


def _arguments(kernel: Any) -> dict[str, Any]:
    """Return the arguments of a kernel factory: what it is compiled for; what has a default keeps it."""
    known = {"B": 1, "S": 64, "H": 4, "G": 1, "NS": 2, "N": STATE, "P": HEAD, "R": RANK, "chunk_size": CHUNK}
    known |= {"hasZ": True, "hasD": True, "reduceO": True, "isVarlen": True, "dtype": "bfloat16"}
    known |= {"rotary_dim_divisor": 4, "packed_dout": False, "fuse_pregate_headwise_rms_norm": False}
    parameters = inspect.signature(kernel.func).parameters
    unknown = [
        name for name, each in parameters.items() if name not in known and each.default is inspect.Parameter.empty
    ]
    if unknown:
        raise TargetAbsent(f"this kernel has other arguments: {', '.join(unknown)}")
    return {name: known[name] for name in parameters if name in known}


def _lower(tilelang: Any, program: Any, configuration: dict[Any, Any]) -> str:
    """Return the CUDA source of a program; nothing is compiled further, and no GPU is needed."""
    named = {getattr(key, "value", key): value for key, value in configuration.items()}
    # An object, and not a name: how a target is spelled changes between releases. The context is for 0.1.8 and 0.1.9.
    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    with target, tilelang.tvm.transform.PassContext(opt_level=3, config=named):
        return str(tilelang.lower(program, target=target).kernel_source)


def _refused(error: Exception) -> str:
    """Return what the compiler says of the layout, shortened.

    Raises:
        Exception: it failed in another way.
    """
    line = next((line for line in str(error).splitlines() if REFUSAL in line), None)
    if line is None:
        raise error
    return line[line.index(REFUSAL) :].split(", projected", maxsplit=1)[0]


class Sum(NamedTuple):
    """A sum in generated CUDA source."""

    name: str
    local: int
    """How often a thread adds a value of its own."""
    threads: int
    """Threads whose results are combined."""

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
    local, threads = added.pop(name, 0), combined.pop(name, 0)
    return [Sum(name, local, threads)] if threads else []


# On a GPU


def _sums_on_gpu() -> Behaviour:
    """Run upstream's backward, take what its kernels write, and compare each sum with float64."""
    import torch

    _import_tilelang()
    module = _kernels("mamba3_mimo_bwd")
    given = inputs("cuda", batch=2, steps=128, heads=4, groups=1, state=128)
    written: dict[str, Any] = {}
    try:
        with _watched(module, written):
            run_backward(module, given)
        torch.cuda.synchronize()
    except Exception as error:
        raise TargetAbsent(f"the MIMO backward does not compile: {_refused(error)}") from error
    right = reference(given)
    said, broken = [], False
    for name, (measured, exact) in compare(written, right).items():
        slope = float((measured * exact).sum() / (exact * exact).sum())
        error = float((measured - exact).norm() / exact.norm())
        broken |= not (abs(slope - 1) < 0.02 and error < 0.05)
        said.append(f"{name} {slope:.4f} (error {error:.1e})")
    return Behaviour(broken=broken, seen=f"sums over float64 sums, least squares: {', '.join(said)}")


def inputs(device: str, *, batch: int, steps: int, heads: int, groups: int, state: int) -> dict[str, Any]:
    """Return inputs of the backward by the names of its host function, all of them of moderate size."""
    import torch

    generator = torch.Generator().manual_seed(17)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(dtype).to(device)

    half, low = 0.3, torch.bfloat16
    decay = -0.02 - 0.2 * torch.rand(batch, heads, steps, generator=generator)
    chunks = decay.view(batch, heads, steps // CHUNK, CHUNK)
    forward = chunks.cumsum(-1)
    backward = chunks.sum(-1, keepdim=True) - forward
    between = (forward[..., :, None] - forward[..., None, :]).tril(-1)  # [later step, earlier step]
    return {
        "dout": normal(batch, steps, heads, HEAD, dtype=low),
        "q": normal(batch, steps, RANK, groups, state, scale=half, dtype=low),
        "k": normal(batch, steps, RANK, groups, state, scale=half, dtype=low),
        "v": normal(batch, steps, heads, HEAD, dtype=low),
        "q_bias": normal(heads, RANK, state, scale=half),
        "k_bias": normal(heads, RANK, state, scale=half),
        "mimo_v": normal(heads, RANK, HEAD),
        "mimo_o": normal(heads, RANK, HEAD),
        "z": normal(batch, steps, heads, HEAD, dtype=low),
        "mimo_z": normal(heads, RANK, HEAD),
        "angles": normal(batch, steps, heads, state // 4),
        "dA_cs": forward.reshape(batch, heads, steps).contiguous().to(device),
        "dA_cs_rev": backward.reshape(batch, heads, steps).contiguous().to(device),
        "dt": (0.1 + 0.4 * torch.rand(batch, heads, steps, generator=generator)).to(device),
        "trap": normal(batch, heads, steps, dtype=low),
        "D": normal(heads),
        "segsum": between.contiguous().to(device),
    }


def run_backward(module: ModuleType, given: dict[str, Any]) -> Any:
    """Call upstream's host function as its autograd function does."""
    call = module.mamba_mimo_bwd_combined
    settings = {"chunk_size": CHUNK, "rotary_dim_divisor": 4, "dtype": given["q"].dtype}
    parameters = inspect.signature(call).parameters
    if set(parameters) - set(given) - set(settings) - {
        name for name, each in parameters.items() if each.default is not inspect.Parameter.empty
    }:
        raise Blocked("this mamba-ssm has another backward; the comparison was written for 2.3.2.post1")
    return call(**given, **settings)


@contextlib.contextmanager
def _watched(module: ModuleType, written: dict[str, Any]) -> Iterator[None]:
    """Keep every tensor that upstream passes to its two kernels, by the kernel's own name for it."""
    names = ("mamba_mimo_bwd_fwd", "mamba_mimo_bwd_bwd")
    real = {name: getattr(module, name) for name in names}

    def watch(factory: Any) -> Callable[..., Any]:
        def build(*arguments: Any) -> Callable[..., None]:
            called = tensor_names(factory, arguments)
            kernel = factory(*arguments)

            def run(*tensors: Any) -> None:
                kernel(*tensors)
                # As the kernel leaves them: the host adds to some of them afterwards.
                written.update((name, tensor.clone()) for name, tensor in zip(called, tensors, strict=True))

            return run

        return build

    try:
        for name in names:
            setattr(module, name, watch(real[name]))
        yield
    finally:
        for name in names:
            setattr(module, name, real[name])


def tensor_names(factory: Any, arguments: tuple[Any, ...]) -> list[str]:
    """Return the names that a kernel gives to its tensors, in the order in which it takes them."""
    program = factory.get_tir(*arguments)
    return [str(program.buffer_map[parameter].name) for parameter in program.params]


def reference(given: dict[str, Any]) -> dict[str, Any]:
    """Return the sums in float64, as gradients of the forward.

    What each sum is the gradient of is a value of its own here: the decays between steps, to the end of a chunk, from
    its beginning and over the whole of it, the two trapezoidal weights, `D` and the gate.
    """
    import torch

    exact = {name: value.double() for name, value in given.items()}
    batch, steps, heads, _ = exact["v"].shape
    repeat = heads // exact["q"].shape[3]

    def per_head(name: str) -> torch.Tensor:
        """Queries or keys with their bias: [batch, heads, steps, rank, state]."""
        value = exact[name].repeat_interleave(repeat, dim=3).permute(0, 3, 1, 2, 4)
        return value + exact[f"{name}_bias"][None, :, None]

    def turned(value: torch.Tensor) -> torch.Tensor:
        width, middle = exact["angles"].shape[-1], value.shape[-1] // 2
        angles = exact["angles"].permute(0, 2, 1, 3)[:, :, :, None]
        result = value.clone()
        first, second = value[..., :width], value[..., middle : middle + width]
        result[..., :width] = angles.cos() * first - angles.sin() * second
        result[..., middle : middle + width] = angles.sin() * first + angles.cos() * second
        return result

    plain_q, plain_k = per_head("q"), per_head("k")
    q, k = turned(plain_q), turned(plain_k)
    up = exact["v"].permute(0, 2, 1, 3)[:, :, :, None] * exact["mimo_v"][None, :, None]  # [b, h, s, r, p]

    trap = exact["trap"].sigmoid()
    later = torch.zeros_like(trap)
    later[..., :-1] = exact["dt"][..., 1:] * (1 - trap[..., 1:])
    leaves = {
        "DDA_CS": exact["dA_cs"].exp(),
        "DDA_CS_REV": exact["dA_cs_rev"].exp(),
        "DSSDA": exact["segsum"].exp(),
        "DDA": exact["dA_cs"][..., CHUNK - 1 :: CHUNK].exp(),
        "DGAMMA_DIAG": exact["dt"] * trap,
        "DFACTOR": exact["dt"] * trap + later,
        "DD": exact["D"].expand(batch, heads).clone(),
        "DMIMO_Z": exact["mimo_z"].expand(batch, *exact["mimo_z"].shape).clone(),
    }
    for value in leaves.values():
        value.requires_grad_(True)

    state = torch.zeros(batch, heads, q.shape[-1], up.shape[-1], dtype=torch.double, device=q.device)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril(-1)
    outputs = []
    for chunk in range(steps // CHUNK):
        here = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        scaled = k[:, :, here] * leaves["DFACTOR"][:, :, here, None, None]
        values = up[:, :, here]
        from_state = torch.einsum("bhirn,bhnp,bhi->bhirp", q[:, :, here], state, leaves["DDA_CS"][:, :, here])
        weights = leaves["DSSDA"][:, :, chunk] * causal
        earlier = torch.einsum("bhirn,bhjsn,bhij,bhjsp->bhirp", q[:, :, here], scaled, weights, values)
        same = torch.einsum("bhirn,bhisn,bhisp->bhirp", plain_q[:, :, here], plain_k[:, :, here], values)
        same = same * leaves["DGAMMA_DIAG"][:, :, here, None, None]
        outputs.append(from_state + earlier + same + leaves["DD"][:, :, None, None, None] * values)
        added = torch.einsum("bhirn,bhi,bhirp->bhnp", scaled, leaves["DDA_CS_REV"][:, :, here], values)
        state = state * leaves["DDA"][:, :, chunk, None, None] + added
    gate = exact["z"].permute(0, 2, 1, 3)[:, :, :, None] * leaves["DMIMO_Z"][:, :, None]
    gated = torch.cat(outputs, dim=2) * torch.nn.functional.silu(gate)
    out = (gated * exact["mimo_o"][None, :, None]).sum(3).permute(0, 2, 1, 3)
    gradients = torch.autograd.grad((out * exact["dout"]).sum(), list(leaves.values()))
    found = dict(zip(leaves, gradients, strict=True))
    found["DDA"] = found["DDA"] * leaves["DDA"].detach()  # the kernel includes the decay over the chunk
    found["DSSDA"] = found["DSSDA"].mT  # the kernel has [earlier step, later step]
    return found


def compare(written: dict[str, Any], right: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each sum as it was written and as it should be, both in float64.

    The sum over a chunk is written once for each of its steps. Between steps, only those after another count.
    """
    measured = {name: written[name].double() for name in right}
    measured["DDA"] = measured["DDA"][..., ::CHUNK]
    measured["DSSDA"] = measured["DSSDA"].triu(1)
    return {name: (measured[name], right[name].triu(1) if name == "DSSDA" else right[name]) for name in right}


# Imports


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


def _kernels(module: str) -> ModuleType:
    """Import a module of kernels, without what the package imports for Mamba-1.

    Raises:
        Blocked: something that the kernels do need is not here.
        TargetAbsent: this mamba-ssm has no MIMO kernels.
    """
    package = ModuleType("mamba_ssm")
    package.__path__ = _mamba_package()
    sys.modules["mamba_ssm"] = package
    if importlib.util.find_spec("einops") is None:
        sys.modules["einops"] = ModuleType("einops")
        sys.modules["einops"].rearrange = sys.modules["einops"].repeat = None  # only their own references use them
    try:
        return importlib.import_module(f"{PACKAGE}.{module}")
    except ImportError as error:
        raise Blocked(f"{module} cannot be imported: {error}") from error


def _mamba_package() -> list[str]:
    spec = importlib.util.find_spec("mamba_ssm")
    if spec is None:
        raise Blocked("mamba-ssm is not installed")
    folders = list(spec.submodule_search_locations or ())
    if not any(Path(folder, "ops", "tilelang", "mamba3", "mamba3_mimo_bwd.py").exists() for folder in folders):
        raise TargetAbsent("this mamba-ssm has no MIMO kernels")
    return folders


_GATE = "mamba3-mimo-reduce-layout"
_VERSIONS = ("mamba-ssm", "tilelang", "apache-tvm-ffi", "z3-solver", "triton")
CASES = (
    Case(name="flattened-product", overlay=_GATE, device="cpu", versions=_VERSIONS, run=_flattened_product),
    Case(name="mimo-backward-varlen", overlay=_GATE, device="cpu", versions=_VERSIONS, run=_varlen_backward),
    Case(
        name="mimo-sums-gpu",
        overlay=None,
        claim="where the MIMO backward compiles, every sum in it equals float64",
        about=(Target("mamba-ssm", f"{PACKAGE}.mamba3_mimo_bwd", "mamba_mimo_bwd_bwd"),),
        device="cuda",
        versions=(*_VERSIONS, "torch"),
        run=_sums_on_gpu,
    ),
)
