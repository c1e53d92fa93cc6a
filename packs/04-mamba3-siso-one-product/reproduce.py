"""Mamba-3's SISO backward writes one product three times: would writing it once change anything?

No overlay. The claim is that nothing would change: the gradients are the same bit for bit, and the compiler has already
merged the three. The other form of the kernel is made here from the installed file, with the product in a variable.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from megacpp_overlays.model import Target
from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

MODULE = "mamba_ssm.ops.triton.mamba3.mamba3_siso_bwd"
KERNEL = "mamba3_siso_bwd_kernel_dqkv"
PRODUCT = "tl.dot(v_block, tl.trans(do_block))"
TIMES = 3
NAMES = ("dQ", "dK", "dV", "dADT", "dQK", "dD", "dState")
"""What `compute_dqkv` returns, in its order."""
USES = {"dQ", "dK", "dADT"}
"""What the product goes into."""


# The other form of the kernel


def count(text: str) -> int:
    """Return how often the kernel writes the product.

    Raises:
        TargetAbsent: there is no such kernel.
    """
    return len(_products(_kernel(ast.parse(text))))


def write_once(text: str, *, factor: int = 1) -> str:
    """Return the file with the product computed once, before its first use, and used by name at every place.

    Args:
        text: the file, with one or more products.
        factor: what the product is multiplied with; other than 1 it shows that all of its uses are measured.
    """
    tree = ast.parse(text)
    kernel = _kernel(tree)
    products = {id(node) for node in _products(kernel)}
    name = "product_written_once"
    value = PRODUCT if factor == 1 else f"{PRODUCT} * {factor}"

    class Name(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            return ast.Name(name, ast.Load()) if id(node) in products else self.generic_visit(node)

    block, index = next(
        (block, index)
        for block in _blocks(kernel)
        for index, statement in enumerate(block)
        if any(id(node) in products for node in ast.walk(statement)) and not hasattr(statement, "body")
    )
    Name().visit(kernel)
    block.insert(index, ast.parse(f"{name} = {value}").body[0])
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _kernel(tree: ast.Module) -> ast.FunctionDef:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == KERNEL:
            return node
    raise TargetAbsent(f"there is no {KERNEL}")


def _products(kernel: ast.FunctionDef) -> list[ast.Call]:
    return [node for node in ast.walk(kernel) if isinstance(node, ast.Call) and ast.unparse(node) == PRODUCT]


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements in a function, outer ones first."""
    for each in ast.walk(node):
        for field in ("body", "orelse"):
            if isinstance(block := getattr(each, field, None), list):
                yield block


# Both forms, loaded


class Forms(NamedTuple):
    """The module as it is installed, and two that were made from it."""

    stock: ModuleType
    once: ModuleType
    doubled: ModuleType
    """The product written once and doubled, so that a comparison which sees nothing is found out."""


@contextmanager
def _forms() -> Iterator[Forms]:
    """Load the installed module and what is made from it; Triton reads the source of a kernel again from its file."""
    stock = _import()
    text = Path(str(stock.__file__)).read_text()
    if (found := count(text)) != TIMES:
        if found == 1:
            raise TargetAbsent(f"{KERNEL} writes the product once")
        raise RuntimeError(f"{KERNEL} writes the product {found} times, and the claim is about {TIMES}")
    with tempfile.TemporaryDirectory() as folder:
        once = _load(Path(folder, "written_once.py"), write_once(text))
        yield Forms(stock, once, _load(Path(folder, "written_once_doubled.py"), write_once(text, factor=2)))


def _import() -> Any:
    if (spec := importlib.util.find_spec("mamba_ssm")) is None:
        raise Blocked("mamba-ssm is not installed")
    try:
        return importlib.import_module(MODULE)
    except ImportError:
        # The package imports transformers and compiled kernels of Mamba-1, which Mamba-3 does not use.
        for name in [name for name in sys.modules if name.partition(".")[0] == "mamba_ssm"]:
            del sys.modules[name]
        package = ModuleType("mamba_ssm")
        package.__path__ = list(spec.submodule_search_locations or ())
        sys.modules["mamba_ssm"] = package
        if importlib.util.find_spec(MODULE.rpartition(".")[0]) is None:
            raise TargetAbsent("this mamba-ssm has no Mamba-3") from None
        try:
            return importlib.import_module(MODULE)
        except ImportError as error:
            raise Blocked(f"mamba-ssm is installed but cannot be imported here: {error}") from error


def _load(path: Path, text: str) -> ModuleType:
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _tuner(module: ModuleType) -> Any:
    """Return the kernel with one configuration left: searching many takes long and decides nothing about values."""
    kernel = vars(module)[KERNEL]
    kernel.configs = [min(kernel.configs, key=_plainness)]
    return kernel


def _plainness(configuration: Any) -> tuple[int, int, bool]:
    """Return a key that is least for one stage, four warps, and no limit on registers."""
    return configuration.num_stages, abs(configuration.num_warps - 4), configuration.maxnreg is not None


# Values


class Shape(NamedTuple):
    """Sizes of one problem; `ends` are the ends of the sequences that are packed into one, none for fixed length."""

    batch: int
    tokens: int
    heads: int
    groups: int
    state: int
    head: int
    chunk: int
    dtype: str
    ends: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return the sizes in words."""
        packed = f"{len(self.ends)} packed sequences" if self.ends else f"batch {self.batch}"
        return f"{packed}, {self.tokens} tokens, {self.heads} heads, {self.dtype}"


def _compare(*shapes: Shape, device: str) -> Behaviour:
    """Compare all gradients of both forms bit by bit."""
    seen, differs, blind = [], False, False
    with _forms() as forms:
        for module in forms:
            _tuner(module)
        for shape in shapes:
            stock, once, doubled = (_gradients(module, shape, device) for module in forms)
            different = [name for name in stock if not _same(stock[name], once[name])]
            reached = {name for name in stock if not _same(stock[name], doubled[name])}
            blind |= reached != USES or not all(bool(value.isfinite().all()) for value in stock.values())
            differs |= bool(different)
            values = sum(value.numel() for value in stock.values())
            seen.append(f"{shape}: {', '.join(different) or 'none'} of {len(stock)} gradients ({values} values) differ")
            seen[-1] += f", with the product doubled {', '.join(sorted(reached)) or 'none'}"
    if blind:
        raise RuntimeError("what was measured does not depend on the product as it should: " + "; ".join(seen))
    return Behaviour(broken=differs, seen="one product used three times against three, bitwise: " + "; ".join(seen))


def _gradients(module: Any, shape: Shape, device: str) -> dict[str, Any]:
    results = _call(module, shape, device)()
    return {name: value for name, value in zip(NAMES, results, strict=True) if value is not None}


def _call(module: Any, shape: Shape, device: str) -> Callable[[], Any]:
    """Return a call of `compute_dqkv` with seeded values."""
    import torch

    generator = torch.Generator().manual_seed(4)
    batch, tokens, heads, chunk = shape.batch, shape.tokens, shape.heads, shape.chunk
    sequences = len(shape.ends) or batch
    chunks = sequences + tokens // chunk if shape.ends else -(-tokens // chunk)
    own = getattr(torch, shape.dtype)

    def normal(*sizes: int, dtype: Any = own) -> Any:
        return torch.randn(*sizes, generator=generator).to(device, dtype)

    def decay(*sizes: int, least: float) -> Any:
        """Return logarithms between two bounds: every factor that the kernel makes of them is in (0, 1]."""
        return (least - torch.rand(*sizes, generator=generator)).to(device)

    given = {
        "q": normal(batch, tokens, shape.groups, shape.state),
        "k": normal(batch, tokens, shape.groups, shape.state),
        "v": normal(batch, tokens, heads, shape.head),
        "da_cs": decay(batch, heads, tokens, least=0.0),
        "da_cs_sum": decay(batch, heads, chunks, least=-1.0),
        "qk_dot": normal(batch, heads, tokens, dtype=torch.float32),
        "SSM_States": normal(batch, heads, shape.head, chunks * shape.state),
        "do": normal(batch, tokens, heads, shape.head),
        "d_ossm_state": normal(sequences, heads, shape.head, shape.state, dtype=torch.float32),
        "D": normal(heads, dtype=torch.float32),
    }
    if shape.ends:
        given["Cu_Seqlens"] = torch.tensor([0, *shape.ends], dtype=torch.int32, device=device)
    if device == "cpu":

        class OnDevice(torch.Tensor):  # type: ignore[misc] # torch is not seen by the type checker
            """The interpreter takes tensors of the CPU, and `compute_dqkv` asks whether they are on a GPU."""

            is_cuda = True
            __torch_function__ = torch._C._disabled_torch_function_impl  # noqa: SLF001 - as torch's documents have it

        given = {name: value.as_subclass(OnDevice) for name, value in given.items()}
    return lambda: module.compute_dqkv(**given, chunk_size=chunk, has_input_state=True)


def _same(one: Any, other: Any) -> bool:
    import torch

    return bool(one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8)))


def _interpreter() -> Behaviour:
    import numpy
    import triton

    try:
        return _compare(*_SMALL, device="cpu")
    except Exception as error:
        # Triton 3.6 turns arrays of one element into numbers, which numpy refuses since 2.4.
        if "only 0-dimensional arrays" not in str(error):
            raise
        versions = f"triton {triton.__version__} does not work with numpy {numpy.__version__}; take numpy below 2.4"
        raise Blocked(f"the interpreter of {versions}") from error


_SMALL = tuple(
    Shape(batch, 40, 2, 1, 16, 16, 16, dtype, ends)
    for dtype in ("float32", "float16")  # the interpreter has no bfloat16 constants
    for batch, ends in ((2, ()), (1, (16, 23, 40)))
)


def _gpu() -> Behaviour:
    fixed = Shape(2, 2048, 16, 1, 128, 64, 64, "bfloat16")
    return _compare(fixed, fixed._replace(batch=1, ends=(512, 1000, 2048)), device="cuda")


# Compiled code


class Compiled(NamedTuple):
    """What a kernel was compiled to."""

    written: int
    """Products in the source, of any factors."""
    left: int
    """Products in Triton's own code, before any instruction of a GPU is chosen."""
    matrix: int
    """Matrix instructions in PTX."""
    lines: tuple[str, ...]
    """PTX without what says where the source is."""


def _code() -> Behaviour:
    """Compile both forms for compute capability 9.0, which needs no GPU."""
    with _forms() as forms:
        stock, once = (_compile(module) for module in forms[:2])
    return _judge_code(stock, once)


def _judge_code(stock: Compiled, once: Compiled) -> Behaviour:
    same = "the same" if stock.lines == once.lines else "other"
    seen = f"tl.dot in the source {stock.written} and {once.written}, after Triton's own optimisation {stock.left} and "
    seen += f"{once.left}, matrix instructions in PTX {stock.matrix} and {once.matrix}, "
    seen += f"{same} PTX of {len(stock.lines)} lines"
    return Behaviour(broken=(stock.left, stock.matrix) != (once.left, once.matrix), seen=seen)


def _compile(module: Any) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tuner = _tuner(module)
    kernel, plain = tuner.fn, tuner.configs[0]
    flags = dict.fromkeys(("RECOMPUTE_MASK", "HAS_D_OSSM_STATE", "RETURN_D_ISSM_STATE", "IS_VARLEN"), False)
    constants: dict[str, Any] = {"CHUNK_SIZE": 64, "HEADDIM_QK": 128, "HEADDIM_V": 64, **flags}
    constants |= dict.fromkeys(("d_OSSM_State", "Cu_Seqlens", "d_ISSM_State"))
    innermost = "_qkdim", "_vdim", "_cs_seqlen", "_dot_seqlen", "_dadt_seqlen", "stride_d_head", "stride_dd_head"
    strides = [name for name in kernel.arg_names if name.startswith("stride_") and name.endswith(innermost)]
    constants |= dict.fromkeys((name for name in strides if not name.startswith("stride_ssm_states_v")), 1)
    types = {name: _type(name) for name in kernel.arg_names}
    signature = {name: "constexpr" if name in constants else type_ for name, type_ in types.items()}
    aligned = [
        (index,)
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or (signature[name] == "i32" and name != "nheads_qk")
    ]  # as the launcher finds it: addresses and strides are multiples of 16
    source = ASTSource(
        kernel,
        signature,
        {name: constants[name] for name in kernel.arg_names if name in constants},
        {index: [["tt.divisibility", 16]] for index in aligned},
    )
    options = {"num_warps": plain.num_warps, "num_stages": plain.num_stages}
    return _read(kernel, triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options))


def _type(name: str) -> str:
    """Return the type of an argument as `compute_dqkv` passes it with bf16 values."""
    if name.startswith("stride_") or name in {"seqlen", "nheads_qk", "headdim_qk", "headdim_v"}:
        return "i32"
    return "*bf16" if name in {"Q", "K", "V", "SSM_States", "dO", "dQ", "dK", "dV"} else "*fp32"


def _read(kernel: Any, compiled: Any) -> Compiled:
    source = sum(
        isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.dot" for node in ast.walk(ast.parse(kernel.src))
    )
    ptx = compiled.asm["ptx"].partition(".section")[0]  # behind it are debug tables
    lines = tuple(line for line in ptx.splitlines() if not re.match(r"\s*(//|\.loc|\.file|\$L__tmp|$)", line))
    matrix = sum(bool(re.search(r"\b(wgmma\.mma_async|mma\.sync)\b", line)) for line in lines)
    return Compiled(source, len(re.findall(r"= tt\.dot\b", compiled.asm["ttir"])), matrix, lines)


def _speed() -> Behaviour:
    """Time both forms in turn, and compare what the launcher compiled."""
    import torch

    shape = Shape(2, 4096, 32, 1, 128, 64, 64, "bfloat16")
    with _forms() as forms:
        calls, compiled = [], []
        for module in forms[:2]:
            tuner = _tuner(module)
            calls.append(_call(module, shape, "cuda"))
            calls[-1]()
            (cached,) = tuner.fn.device_caches[torch.cuda.current_device()][0].values()
            compiled.append(_read(tuner.fn, cached))
        ratios = []
        for _ in range(30):
            times = [_milliseconds(call) for call in calls]
            ratios.append(times[1] / times[0])
    code = _judge_code(*compiled)
    low, middle, high = (statistics.quantiles(ratios, n=10)[index] for index in (0, 4, 8))
    seen = f"{shape}: time of one product over three {middle:.3f} (80% in {low:.3f} to {high:.3f}); {code.seen}"
    return Behaviour(broken=code.broken, seen=seen)


def _milliseconds(call: Callable[[], Any]) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


_ABOUT = (Target("mamba-ssm", MODULE, KERNEL),)
_VERSIONS = ("mamba-ssm", "torch", "triton", "numpy")
_BITS = "the product written three times and the product written once give the same gradients, bit for bit"
_MERGED = "the compiler merges the three products, so that writing one saves no matrix instruction"
CASES = (
    Case(
        name="interpreter",
        overlay=None,
        claim=_BITS,
        about=_ABOUT,
        device="cpu",
        versions=_VERSIONS,
        run=_interpreter,
        environment={"TRITON_INTERPRET": "1"},
    ),
    Case(
        name="machine-code",
        overlay=None,
        claim=_MERGED,
        about=_ABOUT,
        device="cpu",
        versions=_VERSIONS,
        run=_code,
    ),
    Case(name="gpu", overlay=None, claim=_BITS, about=_ABOUT, device="cuda", versions=_VERSIONS, run=_gpu),
    Case(name="gpu-speed", overlay=None, claim=_MERGED, about=_ABOUT, device="cuda", versions=_VERSIONS, run=_speed),
)
