"""Mamba-2's kernels on views of a wide buffer: is the result that of the same numbers without gaps between them?

mamba-ssm's Triton kernels are interpreted on a CPU, in which their integers have the widths that they have when compiled. What
counts is tokens times width. A model has thousands of each; here tokens are few and rows of the buffer are 2**26 numbers
apart, so that the first offset over 2**31 comes with the 33rd token. The buffer is an area of addresses of which hardly any
page is ever touched. Before it lies as much again: there an offset lands that has wrapped, and reads zeros.

On a GPU a row has the tokens and the width that a model has, its inputs are views of its projection, as in mamba-ssm's own
module, and what is true is what its two halves give, the second of which starts with the state in which the first one ended.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import math
import mmap
import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

SCAN, NORM = "mamba_ssm.ops.triton.ssd_combined", "mamba_ssm.ops.triton.layernorm_gated"
HEADS, WIDTH, STATE, CHUNK, TOKENS = 2, 16, 16, 16, 48
BEFORE = 2**31
"""Numbers before the buffer: an offset of 32 bits that has wrapped is not further away."""
APART = 2**26
TOLERANCE = 1e-5
TOLERANCE_BF16 = 0.03


class Long(NamedTuple):
    """A row of a model."""

    tokens: int = 131072
    heads: int = 128
    width: int = 64
    groups: int = 8
    state: int = 128
    chunk: int = 128
    before: int = BEFORE
    device: str = "cuda"

    @property
    def parts(self) -> list[int]:
        """How wide gate, x, B, C and dt are, one behind the other in the projection."""
        return [self.heads * self.width] * 2 + [self.groups * self.state] * 2 + [self.heads]


def _row() -> Behaviour:
    """Scan one row whose inputs are views of a projection."""
    import torch

    module = _module(SCAN)
    with _as_on_a_gpu():
        numbers = torch.Generator().manual_seed(16)
        plain = [
            torch.randn(1, TOKENS, *shape, generator=numbers)
            for shape in ((HEADS, WIDTH), (HEADS,), (1, STATE), (1, STATE), (HEADS, WIDTH))
        ]
        decay = -torch.rand(HEADS, generator=numbers) - 0.5
        *inputs, weights = plain
        true = _scan(module, inputs, decay, weights)
        found = _scan(module, _apart(inputs, APART), decay, weights)
    worst = {name: _far(found[name], true[name]) for name in true}
    return Behaviour(
        broken=not max(worst.values()) < TOLERANCE,
        seen=f"a row of {TOKENS} tokens that are {APART} numbers apart: relative differences from the same row without gaps: {_words(worst)}",
    )


def _scan(module: ModuleType, inputs: list[Any], decay: Any, weights: Any) -> dict[str, Any]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    x, dt, keys, queries = leaves
    output = module.mamba_chunk_scan_combined(x, dt, decay, keys, queries, CHUNK, dt_softplus=True)
    (output * weights).sum().backward()
    names = ("outputs", "gradients of x", "of dt", "of B", "of C")
    return dict(zip(names, (output.detach(), *(each.grad for each in leaves)), strict=True))


def _norm() -> Behaviour:
    """Normalise three rows whose gate is a view of a projection."""
    import torch

    module = _module(NORM)
    with _as_on_a_gpu():
        numbers = torch.Generator().manual_seed(16)
        x, gate, weights = (torch.randn(3, WIDTH, generator=numbers) for _ in range(3))
        true = _normalise(module, x, gate, weights)
        [wide] = _apart([gate[None]], BEFORE // 2)
        found = _normalise(module, x, wide[0], weights)
    worst = {name: _far(found[name], true[name]) for name in true}
    return Behaviour(
        broken=not max(worst.values()) < TOLERANCE,
        seen=f"3 rows that are {BEFORE // 2} numbers apart: relative differences from the same rows without gaps: {_words(worst)}",
    )


def _normalise(module: ModuleType, x: Any, gate: Any, weights: Any) -> dict[str, Any]:
    import torch

    leaves = [each.detach().requires_grad_() for each in (x, gate)]
    ones = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    output = module.rmsnorm_fn(leaves[0], ones, None, z=leaves[1], norm_before_gate=False)
    (output * weights).sum().backward()
    names = ("outputs", "gradients of rows", "of the gate")
    return dict(zip(names, (output.detach(), *(each.grad for each in leaves)), strict=True))


def _long_row(row: Long = Long()) -> Behaviour:  # noqa: B008 # an immutable tuple
    """Scan one row whose inputs are views of its projection, and the same in two halves."""
    import torch

    module = _module(SCAN)
    torch.manual_seed(16)
    *wide, dt = _projection(row)
    leaves = [*(each.unflatten(-1, shape) for each, shape in zip(wide, _shapes(row), strict=True)), dt]
    decay = -torch.rand(row.heads, device=row.device) - 0.5
    weights = torch.randn(leaves[0].shape, dtype=torch.bfloat16, device=row.device)
    true = _in_parts(module, row, leaves, decay, weights, parts=2)
    found = _in_parts(module, row, leaves, decay, weights, parts=1)
    worst = {name: _far(found[name], true[name]) for name in true}
    return Behaviour(
        broken=not max(worst.values()) < TOLERANCE_BF16,
        seen=f"a row of {row.tokens} tokens in a projection of {sum(row.parts)}, bfloat16: "
        f"relative differences from its two halves: {_words(worst)}",
    )


def _shapes(row: Long) -> list[tuple[int, int]]:
    return [(row.heads, row.width)] * 2 + [(row.groups, row.state)] * 2


def _projection(row: Long) -> list[Any]:
    """Return the parts of a projection, [1, tokens, width of the part], and zeros where wrapped offsets lead."""
    import torch

    memory = torch.zeros(row.before + row.tokens * sum(row.parts), dtype=torch.bfloat16, device=row.device)
    whole = memory[row.before :].view(1, row.tokens, -1)
    for rows in whole.chunk(8, dim=1):
        rows.normal_()
    return list(whole.split(row.parts, dim=-1))


def _in_parts(
    module: ModuleType, row: Long, tensors: list[Any], decay: Any, weights: Any, *, parts: int
) -> dict[str, Any]:
    import torch

    leaves = [each.detach().requires_grad_() for each in tensors]
    state, outputs = None, []
    for gate, x, keys, queries, dt in zip(*(each.chunk(parts, dim=1) for each in leaves), strict=True):
        output, state = module.mamba_chunk_scan_combined(
            x, dt, decay, keys, queries, row.chunk, z=gate, dt_softplus=True, initial_states=state, return_final_states=True
        )
        outputs.append(output)
    torch.autograd.backward(outputs, list(weights.chunk(parts, dim=1)))
    names = ("gradients of the gate", "of x", "of B", "of C", "of dt")
    gradients = dict(zip(names, (each.grad for each in leaves), strict=True))
    return {"outputs": torch.cat([each.detach() for each in outputs], dim=1), **gradients}


def _long_norm(row: Long = Long()) -> Behaviour:  # noqa: B008 # an immutable tuple
    """Normalise the rows of one long row whose gate is a view of its projection, and the same in two halves."""
    import torch

    module = _module(NORM)
    torch.manual_seed(16)
    gate = _projection(row)[0][0]
    x, weights = (torch.randn_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
    halves = [
        _normalise(module, *each) for each in zip(*(every.chunk(2) for every in (x, gate, weights)), strict=True)
    ]
    true = {name: torch.cat([each[name] for each in halves]) for name in halves[0]}
    found = _normalise(module, x, gate, weights)
    worst = {name: _far(found[name], true[name]) for name in true}
    return Behaviour(
        broken=not max(worst.values()) < TOLERANCE_BF16,
        seen=f"{row.tokens} rows whose gates are {gate.stride(0)} numbers apart, bfloat16: "
        f"relative differences from their two halves: {_words(worst)}",
    )


def _apart(tensors: list[Any], stride: int) -> list[Any]:
    """Return the same numbers, [1, rows, ...], in rows of one buffer with a stride in between.

    Raises:
        Blocked: this host gives out no such area of addresses.
    """
    import torch

    rows = tensors[0].shape[1]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        area = mmap.mmap(-1, 4 * (BEFORE + rows * stride), flags=flags)
    except OSError as error:
        raise Blocked(f"no area of {4 * (BEFORE + rows * stride) >> 30} GiB of addresses: {error}") from error
    memory, column, found = torch.frombuffer(area, dtype=torch.float32), BEFORE, []
    for each in tensors:
        inner = each[0, 0].stride()
        view = memory.as_strided(each.shape, (rows * stride, stride, *inner), column)
        view.copy_(each)
        found.append(view)
        column += each[0, 0].numel()
    return found


def _far(found: Any, true: Any) -> float:
    return float((found - true).abs().max() / true.abs().max())


def _words(worst: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1e}" for name, value in worst.items())


def _module(name: str) -> ModuleType:
    """Import a module of mamba-ssm past its package, which asks for compiled kernels of Mamba-1.

    Raises:
        Blocked: mamba-ssm or what its kernels need is not installed.
        TargetAbsent: it has no Mamba-2.
    """
    from megacpp_overlays.kernels.mamba2.packed_reference import provide_causal_conv1d

    for each in ("mamba_ssm", "einops", "triton"):
        if importlib.util.find_spec(each) is None:
            raise Blocked(f"{each} is not installed")
    spec = importlib.util.find_spec("mamba_ssm")
    package = ModuleType("mamba_ssm")
    package.__path__ = list((spec and spec.submodule_search_locations) or ())
    package.__version__ = importlib.metadata.version("mamba-ssm")  # type: ignore[attr-defined]
    sys.modules["mamba_ssm"] = package
    provide_causal_conv1d()
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise TargetAbsent(f"there is no {name}") from error
    if os.environ.get("TRITON_INTERPRET") == "1":
        for loaded in [each for each in sys.modules if each.startswith("mamba_ssm.ops.triton")]:
            _take_one_configuration(sys.modules[loaded])
    return module


def _take_one_configuration(module: ModuleType) -> None:
    """Let each tuned kernel use one configuration: the largest blocks, which are interpreted fastest."""
    for kernel in vars(module).values():
        while kernel is not None and not hasattr(kernel, "configs"):
            kernel = getattr(kernel, "fn", None)  # a decorator around the tuner
        if len(getattr(kernel, "configs", ())) > 1:
            kernel.configs = [max(kernel.configs, key=lambda each: (math.prod(each.kwargs.values()), str(each)))]


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Answer what the kernels' launchers ask about their GPU."""
    import torch

    instead: dict[str, Any] = {
        "device": contextlib.nullcontext,
        "get_device_properties": lambda *_: SimpleNamespace(multi_processor_count=1),
    }
    before = {name: getattr(torch.cuda, name) for name in instead}
    try:
        for name, value in instead.items():
            setattr(torch.cuda, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(torch.cuda, name, value)


def _case(name: str, run: Any, target: str, device: str = "cpu") -> Case:
    return Case(
        name=name,
        overlay="mamba2-int32-offsets",
        device=device,
        versions=("torch", "mamba-ssm", "triton"),
        run=run,
        targets=(target,),
        environment={"TRITON_INTERPRET": "1"} if device == "cpu" else {},
    )


CASES = (
    _case("row-cpu", _row, SCAN),
    _case("norm-cpu", _norm, NORM),
    _case("row-gpu", _long_row, SCAN, "cuda"),
    _case("norm-gpu", _long_norm, NORM, "cuda"),
)
