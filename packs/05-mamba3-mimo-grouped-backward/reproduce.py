"""Mamba-3 MIMO with a number of groups between one and all heads: does its backward pass run, and is it right?

On a CPU the two backward kernels are replaced by a reference in PyTorch that, like them, writes gradients for each head;
the host code around them is upstream's. On a GPU everything is upstream's. Either way the gradients are held to float64
autograd of the layer, for one group, all, and what is between. mamba_ssm's own `__init__` is passed by: it imports
transformers and the compiled kernels of Mamba-1, which Mamba-3 does not use.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any
from unittest import mock

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

PACKAGE = "mamba_ssm.ops.tilelang.mamba3"
PLAIN, VARLEN = f"{PACKAGE}.mamba3_mimo_bwd", f"{PACKAGE}.mamba3_mimo_bwd_varlen"
HEADS, GROUPS = 8, (1, 2, 4, 8)
RANK, DIM, VALUE_DIM, CHUNK = 4, 64, 64, 16
LENGTHS = (0, 37, 101, 192)
"""Bounds of three packed sequences; the first and the last do not fill their last chunk."""

Inputs = Any
"""`megacpp_overlays.kernels.mamba3_mimo_reference.Inputs`: tensors by name."""
GRADIENTS = ("q", "k", "v", "adt", "dt", "trap", "q_bias", "k_bias", "mimo_v", "mimo_z", "mimo_o", "angles", "d", "z")
"""What upstream's functions return gradients for, in that order."""
GROUPED = ("q", "k", "q_bias", "k_bias")
"""Whose gradients depend on how heads are summed into groups."""


# On a CPU


def _plain_on_cpu() -> Behaviour:
    return _on_cpu(PLAIN, "mamba_mimo_bwd_combined")


def _varlen_on_cpu() -> Behaviour:
    return _on_cpu(VARLEN, "mamba_mimo_bwd_combined_varlen", 0, 3, 4, 12)


def _on_cpu(module_name: str, symbol: str, *bounds: int) -> Behaviour:
    import torch

    from megacpp_overlays.kernels import mamba3_mimo_reference as reference

    stand_ins = reference.kernels()
    entry = _import(f"{PACKAGE}.mamba3_mimo", stand_ins)
    combined = getattr(entry, symbol)  # the name that the autograd function calls
    module = sys.modules[module_name]
    if "states_dtype" in inspect.signature(combined).parameters:
        raise Blocked("this mamba-ssm sums gradients in a Triton kernel of its own, which needs a GPU")
    in_triton = {name: each for name, each in stand_ins.items() if "triton" in name and hasattr(module, name)}
    lengths = torch.tensor(bounds, dtype=torch.int32) if bounds else None
    said, broken = [], False
    for groups in GROUPS:
        inputs = _inputs(groups, batch=2, sequence=12, rank=2, dim=8, value_dim=4, dtype=torch.float64, device="cpu")
        dout = torch.randn(inputs.v.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        try:
            with mock.patch.multiple(module, **in_triton):
                found = combined(*_upstream_order(inputs, dout), *([] if lengths is None else [lengths]))
        except ValueError as error:
            said.append(f"G = {groups}: {error}")
            broken = True
            continue
        expected = _truth(inputs, dout, lengths)
        away = {name: _distance(one, expected[name]) for name, one in zip(GRADIENTS, found, strict=True)}
        worst = max(away, key=lambda name: away[name])
        broken |= away[worst] > 1e-6  # float32 rounding; some gradients pass through float32 buffers
        said.append(f"G = {groups}: {len(away)} gradients within {away[worst]:.0e} of float64 ({worst})")
    return Behaviour(broken=broken, seen=f"{symbol}, H = {HEADS}, kernels replaced: {'; '.join(said)}")


def _upstream_order(inputs: Inputs, dout: Any) -> tuple[Any, ...]:
    import torch

    q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, mimo_z, mimo_o, angles, d, z = inputs
    segsum = torch.zeros(1)
    chunk, divisor = 4, q.shape[-1] // angles.shape[-1]
    return (
        *(dout, q, k, v, q_bias, k_bias, mimo_v, mimo_o, z, mimo_z, angles, adt, adt, dt, trap, d, segsum),
        *(chunk, divisor, torch.float64),
    )


# On a GPU


def _plain_on_gpu() -> Behaviour:
    return _on_gpu(None)


def _varlen_on_gpu() -> Behaviour:
    return _on_gpu(LENGTHS)


def _on_gpu(bounds: tuple[int, ...] | None) -> Behaviour:
    numbers, broken, said = accuracy(bounds), False, []
    for groups, seen in numbers.items():
        if "raises" in seen:
            broken = True
            said.append(f"G = {groups}: {seen['raises']}")
            continue
        problems = problems_of(seen, numbers)
        broken |= bool(problems)
        away = ", ".join(f"{name} {seen['away'][name]:.1e}" for name in GROUPED)
        others = max(value for name, value in seen["away"].items() if name not in GROUPED)
        said.append(f"G = {groups}: {'; '.join([*problems, f'from float64: {away}, others up to {others:.1e}'])}")
    return Behaviour(broken=broken, seen=f"H = {HEADS}, bfloat16, upstream's kernels: {'; '.join(said)}")


def problems_of(seen: dict[str, Any], numbers: dict[int, dict[str, Any]]) -> list[str]:
    """Return in words what is wrong with the gradients of one number of groups.

    One group and all groups are upstream's own, so they say what kernels in bfloat16 are good for; what is between may be
    twice as far from float64. What depends on groups may not be farther than upstream's own tests allow, 0.1.
    """
    edges = [numbers[groups]["away"] for groups in (1, HEADS)]
    problems = [f"{name} differs when run again" for name in seen["unsteady"]]
    problems += [f"{name} is not what a group for each head gives" for name in seen["unlike_all"]]
    for name, away in seen["away"].items():
        bound = 2 * max(edge[name] for edge in edges) + 1e-3
        bound = min(bound, 0.1) if name in GROUPED else 2 * bound
        if not away <= bound:
            problems.append(f"{name} is {away:.1e} away from float64, more than {bound:.1e}")
    return problems


def accuracy(bounds: tuple[int, ...] | None, groups: tuple[int, ...] = GROUPS) -> dict[int, dict[str, Any]]:
    """Return for each number of groups how far gradients are from float64, and which of them are not steady.

    `unlike_all` has those that are not what the same queries and keys give when each head gets its own copy: equal
    bits, or for q and k the float64 sum over the copies up to one rounding.
    """
    import torch

    entry = _import(f"{PACKAGE}.mamba3_mimo")
    take_one_configuration()
    from megacpp_overlays.kernels import mamba3_mimo_reference as reference

    lengths = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device="cuda")
    batch, sequence = (2, 128) if bounds is None else (1, bounds[-1])
    numbers: dict[int, dict[str, Any]] = {}
    for number in groups:
        inputs = _inputs(
            number, batch=batch, sequence=sequence, rank=RANK, dim=DIM, value_dim=VALUE_DIM, dtype=torch.bfloat16, device="cuda"
        )
        dout = torch.randn(inputs.v.shape, generator=torch.Generator().manual_seed(5)).cuda().bfloat16()
        try:
            found = layer_gradients(entry, inputs, dout, lengths)
        except ValueError as error:
            numbers[number] = {"raises": str(error)}
            continue
        again = [layer_gradients(entry, inputs, dout, lengths) for _ in range(3)]
        copies = inputs._replace(q=reference.of_heads(inputs.q, HEADS), k=reference.of_heads(inputs.k, HEADS))
        alone = layer_gradients(entry, copies, dout, lengths)
        expected = _truth(inputs, dout, lengths, raw_angles=True)
        numbers[number] = {
            "away": {name: _distance(found[name], expected[name]) for name in GRADIENTS},
            "unsteady": [name for name in GRADIENTS if any(not each[name].equal(found[name]) for each in again)],
            "unlike_all": [name for name in GRADIENTS if not _alike(found[name], alone[name], name, number)],
        }
    return numbers


def layer_gradients(entry: ModuleType, inputs: Inputs, dout: Any, lengths: Any) -> dict[str, Any]:
    """Return the gradients of upstream's layer function, `mamba3_mimo`, by name."""
    import torch

    leaves = [each if each.requires_grad else each.detach().clone().requires_grad_() for each in inputs]
    q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, mimo_z, mimo_o, angles, d, z = leaves
    out = entry.mamba3_mimo(
        *(q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, mimo_z, mimo_o, angles, d, z),
        *(CHUNK, DIM // angles.shape[-1], v.dtype),
        cu_seqlens=lengths,
    )
    return dict(zip(GRADIENTS, torch.autograd.grad(out, leaves, dout), strict=True))


def _alike(found: Any, alone: Any, name: str, groups: int) -> bool:
    if name not in ("q", "k"):
        return bool(found.equal(alone))
    copies = alone.double().unflatten(3, (groups, -1))
    exact, size = copies.sum(4), copies.abs().sum(4)
    return bool(((found.double() - exact).abs() <= exact.abs() * 2**-8 + size * 2**-20).all())


def _training_on_gpu() -> Behaviour:
    said, broken = [], False
    for groups in GROUPS[1:-1]:
        try:
            losses = train(groups)
        except ValueError as error:
            said.append(f"G = {groups}: {error}")
            broken = True
            continue
        good = all(loss == loss and abs(loss) < 1e6 for loss in losses) and losses[-1] < losses[0]
        broken |= not good
        said.append(f"G = {groups}: {len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    return Behaviour(broken=broken, seen=f"two Mamba3(is_mimo=True) with {HEADS} heads: {'; '.join(said)}")


def train(groups: int, steps: int = 20) -> list[float]:
    """Return the losses of a small model of two real Mamba-3 layers; a NaN in a gradient shows as a loss of NaN."""
    import torch

    mamba3 = _import("mamba_ssm.modules.mamba3").Mamba3
    take_one_configuration()
    torch.manual_seed(groups)
    width = HEADS * VALUE_DIM // 2
    options = {"d_state": DIM, "headdim": VALUE_DIM, "is_mimo": True, "mimo_rank": RANK, "chunk_size": CHUNK}
    layers = torch.nn.ModuleList(
        mamba3(d_model=width, ngroups=groups, dtype=torch.bfloat16, device="cuda", **options) for _ in range(2)
    )
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)
    inputs = torch.randn(2, 128, width, generator=torch.Generator().manual_seed(1)).cuda().bfloat16()
    wanted = inputs.roll(1, dims=1).float()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        states = inputs
        for layer in layers:
            states = states + layer(states)
        loss = (states.float() - wanted).pow(2).mean()
        loss.backward()
        finite = all(bool(torch.isfinite(each.grad).all()) for each in layers.parameters())
        optimizer.step()
        losses.append(float(loss) if finite else float("nan"))
    return losses


def take_one_configuration() -> None:
    """Let each tuned Triton kernel of Mamba-3 use one configuration: searching for the best takes longer than the rest."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mamba_ssm.ops.triton"):
            for kernel in vars(module).values():
                while kernel is not None and not hasattr(kernel, "configs"):
                    kernel = getattr(kernel, "fn", None)  # a decorator around the tuner
                if len(getattr(kernel, "configs", ())) > 1:
                    kernel.configs = [min(kernel.configs, key=_plainness)]


def _plainness(configuration: Any) -> tuple[int, int, bool, str]:
    limited = configuration.maxnreg is not None
    return configuration.num_stages, abs(configuration.num_warps - 4), limited, str(configuration.kwargs)


# Both


def _inputs(
    groups: int, *, batch: int, sequence: int, rank: int, dim: int, value_dim: int, dtype: Any, device: str
) -> Inputs:
    """Return what a layer computes with; angles are raw on a GPU and rotations on a CPU, where any number is one."""
    import torch

    from megacpp_overlays.kernels.mamba3_mimo_reference import Inputs

    generator = torch.Generator().manual_seed(groups)
    wide = torch.float32 if dtype is torch.bfloat16 else dtype

    def normal(*shape: int, dtype: Any = wide) -> Any:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    dt = torch.nn.functional.softplus(normal(batch, HEADS, sequence) - 3)
    return Inputs(
        q=normal(batch, sequence, rank, groups, dim, dtype=dtype),
        k=normal(batch, sequence, rank, groups, dim, dtype=dtype),
        v=normal(batch, sequence, HEADS, value_dim, dtype=dtype),
        adt=-dt * torch.nn.functional.softplus(normal(batch, HEADS, sequence)),
        dt=dt,
        trap=normal(batch, HEADS, sequence, dtype=dtype),
        q_bias=normal(HEADS, rank, dim),
        k_bias=normal(HEADS, rank, dim),
        mimo_v=normal(HEADS, rank, value_dim) / rank,
        mimo_z=normal(HEADS, rank, value_dim),
        mimo_o=normal(HEADS, rank, value_dim) / rank,
        angles=normal(batch, sequence, HEADS, dim // 4),
        d=normal(HEADS),
        z=normal(batch, sequence, HEADS, value_dim, dtype=dtype),
    )


def _truth(inputs: Inputs, dout: Any, lengths: Any, *, raw_angles: bool = False) -> dict[str, Any]:
    """Return float64 gradients by name, those of q and k through autograd of what shares them among heads."""
    import torch

    from megacpp_overlays.kernels import mamba3_mimo_reference as reference

    wide = reference.Inputs(*(each.detach().double().requires_grad_() for each in inputs))
    angles = reference.cumulative_angles(wide.angles, wide.dt, lengths) if raw_angles else wide.angles
    out = reference.forward(wide._replace(angles=angles), lengths)
    return dict(zip(GRADIENTS, torch.autograd.grad(out, list(wide), dout.double()), strict=True))


def _distance(found: Any, expected: Any) -> float:
    """Return how far a gradient is from the true one, relative in the Euclidean norm; NaN for NaN or another shape."""
    if found.shape != expected.shape:
        return float("nan")
    return float((found.double() - expected).norm() / expected.norm())


def _import(name: str, stand_ins: Mapping[str, Callable[..., Any]] | None = None) -> ModuleType:
    """Return a module of mamba_ssm.

    Args:
        name: of the module.
        stand_ins: what computes in place of TileLang's kernels, by their names; None for the kernels as they are.

    Raises:
        Blocked: this host cannot import it.
        TargetAbsent: this mamba-ssm has no Mamba-3 MIMO.
    """
    spec = importlib.util.find_spec("mamba_ssm")
    if spec is None:
        raise Blocked("mamba-ssm is not installed")
    if sys.modules.get("mamba_ssm") is None:
        package = sys.modules["mamba_ssm"] = ModuleType("mamba_ssm")
        package.__spec__, package.__path__ = spec, list(spec.submodule_search_locations or ())
    for needed in ("torch", "triton", *(("tilelang", "einops") if stand_ins is None else ())):
        if importlib.util.find_spec(needed) is None:
            raise Blocked(f"{needed} is not installed")
    if stand_ins is None:
        _trace_once()
    else:
        _stand_in_for_compilers()
    try:
        with contextlib.nullcontext() if stand_ins is None else _kernels_compiled_to(stand_ins):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise TargetAbsent(f"this mamba-ssm has no {error.name}") from error
        raise


def _trace_once() -> None:
    """Let a kernel be traced once in a process instead of with every call, which takes seconds and changes no result.

    2.3.2.post1 asks for new symbols at each call, and TileLang 0.1.8 takes other symbols for another kernel.
    """
    import tilelang.language as language

    if not hasattr(language.dynamic, "cache_info"):
        language.dynamic = functools.cache(language.dynamic)


class _StandIn:
    """A kernel that TileLang's decorator was to compile, and that computes in PyTorch."""

    def __init__(self, kernel: Callable[..., Any], stand_in: Callable[..., Any]) -> None:
        functools.update_wrapper(self, kernel)
        self._stand_in = stand_in

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._stand_in(*arguments, **named)


@contextlib.contextmanager
def _kernels_compiled_to(stand_ins: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let `tilelang.jit` make stand-ins of kernels; a name of a module that is replaced later would be another repair's."""
    import tilelang

    upstreams = tilelang.jit

    def jit(*arguments: Any, **named: Any) -> Callable[[Any], Any]:
        def compiled(kernel: Any) -> Any:
            stand_in = stand_ins.get(kernel.__name__)
            return upstreams(*arguments, **named)(kernel) if stand_in is None else _StandIn(kernel, stand_in)

        return compiled

    with mock.patch.object(tilelang, "jit", jit):
        yield


def _stand_in_for_compilers() -> None:
    """Give what is not installed a module of that name: kernels are only defined here, and none is compiled."""

    class Anything:
        def __getattr__(self, name: str) -> Any:
            return name

    def decorator(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda function: function

    names = {
        "tilelang": {"jit": decorator, "PassConfigKey": Anything(), "language": None, "__path__": []},
        "tilelang.language": {"dynamic": str},
        "tilelang.autotuner": {"autotune": decorator},
        "tilelang.profiler": {"do_bench": None},
        "einops": {"rearrange": None, "repeat": None},
    }
    missing = [name for name in ("tilelang", "einops") if importlib.util.find_spec(name) is None]
    for name, attributes in names.items():
        if name.partition(".")[0] in missing:
            module = sys.modules[name] = ModuleType(name)
            vars(module).update(attributes)
            if "." in name:
                vars(sys.modules["tilelang"])[name.partition(".")[2]] = module


_OVERLAY = "mamba3-mimo-gqa-backward"
_VERSIONS = ("mamba-ssm", "tilelang", "torch", "triton")


def _case(name: str, device: str, run: Callable[[], Behaviour], *targets: str) -> Case:
    return Case(name=name, overlay=_OVERLAY, device=device, versions=_VERSIONS, run=run, targets=targets)


CASES = (
    _case("plain-cpu", "cpu", _plain_on_cpu, PLAIN),
    _case("varlen-cpu", "cpu", _varlen_on_cpu, VARLEN),
    _case("plain-gpu", "cuda", _plain_on_gpu, PLAIN),
    _case("varlen-gpu", "cuda", _varlen_on_gpu, VARLEN),
    _case("training-gpu", "cuda", _training_on_gpu, PLAIN),
)
