"""Flat shared memory for Mamba-3's MIMO backward: does it compile, and does it gain TMA loads?

No overlay. The claims are that the flat form of the second kernel does not compile where upstream's form does, and that
switching TMA lowering on gains no load. The flat form is made here from the installed file: buffers with three axes
(chunk, rank, rank) and views (chunk, rank, N) get two, and Q, K and QK_DOT lose an axis. One half of it does compile, and
that is shown, too. Lowering needs tilelang and no GPU; each runs in a process of its own, since a compiler may abort.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from megacpp_overlays.model import Target
from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

MODULE = "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd"
FIRST, SECOND = "mamba_mimo_bwd_fwd", "mamba_mimo_bwd_bwd"
SITES = {
    FIRST: {"buffers": 0, "fragments": 2, "views": 2, "tensors": 3, "loops": 2},
    SECOND: {"buffers": 3, "fragments": 2, "views": 1, "tensors": 3, "loops": 5},
}
"""What is made flat in each kernel of 2.3.2.post1: buffers (chunk, rank, rank), fragments of Q and K, views (chunk, rank,
N) of shared memory, arguments, and loops over the fragments and buffers."""
Q_AND_K = {
    FIRST: {"buffers": 0, "fragments": 2, "views": 2, "tensors": 2, "loops": 2},
    SECOND: {"buffers": 0, "fragments": 2, "views": 1, "tensors": 2, "loops": 4},
}
"""The same for Q and K alone."""
SHAPE = {"B": 1, "S": 64, "H": 4, "G": 1, "N": 64, "P": 64, "R": 4, "hasZ": True, "hasD": True, "reduceO": True}
OPTIONS = {"chunk_size": 16, "rotary_dim_divisor": 4, "dtype": "bfloat16"}


# The flat form


def flatten(text: str, *, loops: bool = True, squares: bool = True) -> str:
    """Return the file with both kernels flat.

    Args:
        text: the file.
        loops: whether loops over (chunk, rank, x) of what became flat run over the flat axis, too; else only the
            places are computed, and the loops stay as they are.
        squares: whether (chunk, rank, rank) and QK_DOT become flat, too; else only Q, K and what holds them.

    Raises:
        TargetAbsent: there are no such kernels, or what is to be made flat is not what it was in 2.3.2.post1.
    """
    tree = ast.parse(text)
    kernels = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in SITES}
    if set(kernels) != set(SITES):
        raise TargetAbsent(f"there are no {FIRST} and {SECOND}")
    for name, kernel in kernels.items():
        storage = _Storage(squares=squares)
        storage.visit(kernel)
        over = _Loops(storage.flat, change=loops)
        over.visit(kernel)
        found = {what: (storage.done + over.done)[what] for what in SITES[name]}
        expected = SITES[name] if squares else Q_AND_K[name]
        if found != expected:
            raise TargetAbsent(f"{name} is not the kernel that was read: {found}")
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


class _Storage(ast.NodeTransformer):
    """Give what has three axes two: (chunk, rank, rank) becomes (chunk, rank * rank), (chunk, rank, N) becomes
    (chunk * rank, N)."""

    def __init__(self, *, squares: bool) -> None:
        self.done: Counter[str] = Counter()
        self.flat: set[str] = set()
        self._squares = squares
        self._square: set[str] = set()
        self._long: set[str] = set()
        self._views: dict[str, str] = {}

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=ast.Call(func=function, args=args) as call):
                made, sizes = ast.unparse(function), _sizes(call)
            case _:
                return self.generic_visit(node)
        if made in {"T.alloc_shared", "T.alloc_fragment"} and sizes == ["chunk_size", "R", "R"] and self._squares:
            return self._made(node, call, "buffers", self._square, "[chunk_size, R * R]")
        if made == "T.alloc_fragment" and sizes == ["chunk_size", "R", "N"] and name in {"q_frag", "k_frag"}:
            return self._made(node, call, "fragments", self._long, "[fused_chunk_size, N]")
        if made == "T.view" and sizes == ["chunk_size", "R", "N"] and (of := ast.unparse(args[0])).endswith("_shared"):
            self.done["views"] += 1
            self._views[name] = of
            return ast.Pass()
        return self.generic_visit(node)

    def _made(self, node: ast.Assign, call: ast.Call, what: str, names: set[str], sizes: str) -> ast.AST:
        self.done[what] += 1
        name = ast.unparse(node.targets[0])
        names.add(name)
        self.flat.add(name)
        call.args[0] = _expression(sizes)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        flat = {"Q": "[B, S * R, G, N]", "K": "[B, S * R, G, N]"}
        flat |= {"QK_DOT": "[B, H, S, R * R]"} if self._squares else {}
        if isinstance(node.annotation, ast.Call) and node.arg in flat and len(_sizes(node.annotation)) == 5:
            self.done["tensors"] += 1
            node.annotation.args[0] = _expression(flat[node.arg])
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self._views.get(node.id, node.id), node.ctx)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        name = ast.unparse(node.value)
        axes = [ast.unparse(each) for each in getattr(node.slice, "elts", [node.slice])]
        match name, axes:
            case _, [chunk, out, into] if name in self._square:
                axes = [chunk, f"{out} * R + {into}"]
            case _, [chunk, rank, last] if name in self._long or name in self._views:
                axes = [f"{chunk} * R + {rank}", last]
            case "QK_DOT", [batch, head, chunk, ":", ":"] if self._squares:
                axes = [batch, head, chunk, ":"]
            case "QK_DOT", [batch, head, chunk, out, into] if self._squares:
                axes = [batch, head, chunk, f"{out} * R + {into}"]
            case "Q" | "K", [batch, _, ":", group, last]:
                axes = [batch, "fused_chunk_start:fused_chunk_start + fused_chunk_size", group, last]
            case "Q" | "K", [batch, chunk, rank, group, last]:
                axes = [batch, f"({chunk}) * R + {rank}", group, last]
            case _:
                return self.generic_visit(node)
        node.value = ast.Name(self._views.get(name, name), ast.Load())
        node.slice = getattr(_expression(f"x[{', '.join(axes)}]"), "slice")  # noqa: B009 - an expression has none
        return node


class _Loops(ast.NodeTransformer):
    """Let the loops over what is flat run over the flat axis."""

    def __init__(self, names: set[str], *, change: bool) -> None:
        self.done: Counter[str] = Counter()
        self._names = names
        self._change = change

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        heading = re.fullmatch(r"T\.Parallel\(chunk_size, R, (.+)\)", ast.unparse(node.iter))
        if heading is None:
            return node
        used = {ast.unparse(each.value) for each in ast.walk(node) if isinstance(each, ast.Subscript)}
        if not used & self._names:
            return node
        self.done["loops"] += 1
        chunk, rank, last = ast.unparse(node.target).strip("()").split(", ")
        size = heading[1]
        body = "\n".join(ast.unparse(statement) for statement in node.body)
        if size == "R":
            head = f"for {chunk}, rr in T.Parallel(chunk_size, R * R):"
            body = body.replace(f"{rank} * R + {last}]", "rr]")
            places = {rank: "(rr // R)", last: "(rr % R)"}
        else:
            head = f"for csr, {last} in T.Parallel(fused_chunk_size, {size}):"
            body = body.replace(f"(chunk_start + {chunk}) * R + {rank}", "fused_chunk_start + csr")
            body = body.replace(f"{chunk} * R + {rank}", "csr")
            places = {chunk: "(csr // R)", rank: "(csr % R)"}
        for name, place in places.items():
            body = re.sub(rf"\b{name}\b", place, body)
        lines = [head, *(f"    {line}" for line in body.splitlines())]
        return ast.parse("\n".join(lines)).body[0] if self._change else node


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _sizes(call: ast.Call) -> list[str]:
    """Return the list of sizes that a call is given; empty where there is none."""
    for each in (*call.args, *(keyword.value for keyword in call.keywords)):
        if isinstance(each, ast.List):
            return [ast.unparse(element) for element in each.elts]
    return []


def _places_only(text: str) -> str:
    return flatten(text, loops=False)


def _q_and_k_only(text: str) -> str:
    return flatten(text, squares=False)


FORMS: dict[str, Callable[[str], str]] = {
    "stock": str,
    "flat": flatten,
    "flat, loops as they are": _places_only,
    "flat Q and K alone": _q_and_k_only,
}


# Lowering


class Lowered(NamedTuple):
    """What came of lowering one kernel."""

    loads: int | None
    """TMA loads in the source of the GPU program; None where it does not compile."""
    reason: str
    """Why there is no program."""
    digest: str = ""
    """SHA-256 of the source."""

    def __str__(self) -> str:
        """Return it in words."""
        if self.loads is None:
            return f"does not compile: {' '.join(self.reason.split())[:110]}"
        return f"compiles, {self.loads} TMA loads"


def _second_kernel() -> Behaviour:
    """Lower the second kernel as it is, and flat in both ways with TMA lowering off and on."""
    stock, *flat = _lower_all(
        SECOND,
        ("stock", False),
        *((form, tma) for form in ("flat", "flat, loops as they are") for tma in (False, True)),
    )
    seen = f"{SECOND} for sm_90a: {_in_words([stock, *flat])}"
    holds = stock[2].loads is not None and all(found.loads is None for *_, found in flat)
    return Behaviour(broken=not holds, seen=seen)


def _q_and_k() -> Behaviour:
    """Lower the second kernel as it is, and with Q and K flat alone."""
    lowered = _lower_all(SECOND, ("stock", False), ("flat Q and K alone", False))
    stock, half = (found for *_, found in lowered)
    same = "the same" if stock.digest == half.digest else "another"
    seen = f"{SECOND} for sm_90a: {_in_words(lowered)}; {same} GPU program"
    return Behaviour(broken=stock.loads is None or half.loads is None, seen=seen)


def _first_kernel() -> Behaviour:
    """Lower the first kernel with TMA lowering on, as it is and flat."""
    lowered = _lower_all(FIRST, ("stock", True), ("flat", True))
    stock, flat = (found for *_, found in lowered)
    seen = f"{FIRST} for sm_90a: {_in_words(lowered)}"
    if stock.loads is None and "InputDim() == 2" in stock.reason:
        raise TargetAbsent(f"this tilelang copies no more than two axes where the layout is not linear: {seen}")
    return Behaviour(broken=(stock.loads, flat.loads) != (0, 0), seen=seen)


def _in_words(lowered: list[tuple[str, bool, Lowered]]) -> str:
    return "; ".join(f"{form}, TMA {'on' if tma else 'off'}: {found}" for form, tma, found in lowered)


def _lower_all(kernel: str, *asked: tuple[str, bool]) -> list[tuple[str, bool, Lowered]]:
    """Lower forms of a kernel with TMA lowering off or on, some at the same time: each takes a minute or more."""
    if importlib.util.find_spec("tilelang") is None:
        raise Blocked("tilelang is not installed")
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        found = list(pool.map(lambda each: _lower_apart(each[0], kernel, tma=each[1]), asked))
    return [(form, tma, each) for (form, tma), each in zip(asked, found, strict=True)]


def _lower_apart(form: str, kernel: str, *, tma: bool) -> Lowered:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, __file__, form, kernel, "on" if tma else "off", str(answer)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
        if not answer.exists():
            found = Lowered(None, f"the process died with {done.returncode}: {_last(done.stderr)}")
        else:
            kind, *rest = json.loads(answer.read_text())
            if kind == "absent":
                raise TargetAbsent(rest[0])
            if kind == "blocked":
                raise Blocked(rest[0])
            found = Lowered(*rest)
    print(f"{kernel}, {form}, TMA {'on' if tma else 'off'}: {found}", flush=True)
    return found


def _last(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no word")


def _answer(form: str, kernel: str, tma: str) -> tuple[Any, ...]:
    """Lower a form of a kernel in this process."""
    try:
        module = _load(form)
    except TargetAbsent as error:
        return ("absent", str(error))
    except Blocked as error:
        return ("blocked", str(error))
    try:
        source = _lower(vars(module)[kernel], tma=tma == "on")
    except Exception as error:  # noqa: BLE001 - however the compiler refuses is the answer
        return ("lowered", None, f"{type(error).__name__}: {_essence(str(error))}")
    loads = len(re.findall(r"\btl::tma_load\w*[<(]", source))
    return ("lowered", loads, "", hashlib.sha256(source.encode()).hexdigest())


def _essence(text: str) -> str:
    """Return what a long message of the compiler says: the failed check, or its first line."""
    found = re.search(r"Check failed:.*|[^\n]*(?:[Ll]ayout infer|[Ll]ayout conflict|cannot lower)[^\n]*", text)
    return found[0] if found else _last(text.splitlines()[0] if text.splitlines() else "")


def _load(form: str) -> Any:
    """Return the installed module, or one that was made from it."""
    stock = _import()
    if form == "stock":
        flatten(Path(str(stock.__file__)).read_text())  # so that no other kernel is measured in its place
        return stock
    path = Path(
        tempfile.mkdtemp(), re.sub(r"\W+", "_", form) + ".py"
    )  # tilelang reads the source again when it compiles
    path.write_text(FORMS[form](Path(str(stock.__file__)).read_text()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _import() -> Any:
    if (spec := importlib.util.find_spec("mamba_ssm")) is None:
        raise Blocked("mamba-ssm is not installed")
    # The package imports transformers and compiled kernels of Mamba-1, which Mamba-3 does not use.
    package = ModuleType("mamba_ssm")
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["mamba_ssm"] = package
    try:
        if importlib.util.find_spec(MODULE) is None:
            raise TargetAbsent("this mamba-ssm has no Mamba-3 MIMO")
        return importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if error.name and MODULE.startswith(error.name):
            raise TargetAbsent("this mamba-ssm has no Mamba-3 MIMO") from error
        raise Blocked(f"mamba-ssm is installed but cannot be imported here: {error}") from error


def _lower(function: Any, *, tma: bool) -> str:
    """Return what tilelang writes for compute capability 9.0; compiles no program."""
    import tilelang
    from tilelang import tvm
    from tvm.target import Target as Device

    try:
        device = Device("cuda -arch=sm_90a")
    except Exception:  # noqa: BLE001 - from 0.1.12 on a target is a table
        device = Device({"kind": "cuda", "arch": "sm_90a"})
    options = {str(getattr(key, "value", key)): value for key, value in (function.pass_configs or {}).items()}
    if tma:
        options |= {"tl.disable_tma_lower": False, "tl.disable_warp_specialized": False}
    with tvm.transform.PassContext(opt_level=3, config=options), device:
        made = tilelang.lower(
            function.get_tir(*SHAPE.values(), **OPTIONS),
            target=device,
            enable_host_codegen=False,
            enable_device_compile=False,
        )
    return str(made.kernel_source)


_VERSIONS = ("mamba-ssm", "tilelang", "apache-tvm-ffi")
CASES = (
    Case(
        name="second-kernel",
        overlay=None,
        claim="the second kernel compiles as it is and does not compile flat, with TMA lowering off and on",
        about=(Target("mamba-ssm", MODULE, SECOND),),
        device="cpu",
        versions=_VERSIONS,
        run=_second_kernel,
    ),
    Case(
        name="q-and-k",
        overlay=None,
        claim="with Q and K flat alone, and the products of Q and K as they are, the second kernel compiles",
        about=(Target("mamba-ssm", MODULE, SECOND),),
        device="cpu",
        versions=_VERSIONS,
        run=_q_and_k,
    ),
    Case(
        name="tma-loads",
        overlay=None,
        claim="with TMA lowering switched on the first kernel has no TMA load, as it is and flat",
        about=(Target("mamba-ssm", MODULE, FIRST),),
        device="cpu",
        versions=_VERSIONS,
        run=_first_kernel,
    ),
)

if __name__ == "__main__":
    *asked, answer = sys.argv[1:]
    Path(answer).write_text(json.dumps(_answer(*asked)))
