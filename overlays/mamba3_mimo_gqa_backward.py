"""Gradients of Mamba-3's MIMO backward, summed into any number of groups that divides the heads.

The kernels of mamba-ssm support every G that divides H: they read group `head // (H // G)` of queries and keys, and write
gradients for each head. Only the host code behind them raises for 1 < G < H. In these cases it runs here as if every head
had its own group: it gets stand-ins of queries and keys with H groups, while both kernels get the real tensors.
So upstream allocates, launches and reduces as it does for G = H, with the gradients of the biases from the
gradients per head, in upstream's dtype. The seam then sums blocks of H // G heads.

One call runs upstream's code object over a copy of its module's names, in which the two kernel factories return
kernels that replace the stand-ins by the tensors. No state is shared between calls or threads, and the module is not changed.
G = 1, G = H and a G that does not divide H are left to upstream's own function, and so is a call without `cu_seqlens`
in the variant for packed sequences, which upstream passes on to the plain one.

Nothing is read from the device, so a backward pass can be captured into a CUDA graph wherever upstream's can. That is the plain
one; the packed one reads `cu_seqlens` on the host. There are no atomics in the kernels, and none in the sums.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import FunctionType, MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import mamba3_mimo_gqa_backward as feature
from megacpp_overlays.model import Finding, Observation, Overlay, Replacement, Target, Thread
from megacpp_overlays.source.trees import SourceTree

FACTORIES = ("mamba_mimo_bwd_fwd", "mamba_mimo_bwd_bwd")
"""Factories of the two kernels, in both modules."""
REDUCE = "reduce_grouped_qk_grads_and_bias_triton"
"""Function of main that sums gradients of groups."""

_rehearsed: ContextVar[Mapping[str, Any]] = ContextVar("mamba3_mimo_rehearsed", default=MappingProxyType({}))
"""Replacements by name for upstream's kernels, which need a GPU; set by a self-test for its own calls only."""


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    from megacpp_overlays.kernels.mamba3.grouped_head_reduction import sum_groups

    packed = _place_of("cu_seqlens", original)

    def combined(dout: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        groups, heads = q.shape[3], v.shape[-2]
        lengths = () if packed is None else kwargs.get("cu_seqlens", args[packed] if packed < len(args) else None)
        if groups in {1, heads} or heads % groups or lengths is None:
            return original(dout, q, k, v, *args, **kwargs)
        stand_ins = [each[:, :, :, :1].detach().expand(-1, -1, -1, heads, -1) for each in (q, k)]
        names = {**original.__globals__, **_rehearsed.get()}
        with_a_group_for_each = _over(original, names | _launching(names, stand_ins, (q, k)))
        dq, dk, *others = with_a_group_for_each(dout, *stand_ins, v, *args, **kwargs)
        return (sum_groups(dq, groups), sum_groups(dk, groups), *others)

    return combined


def _place_of(name: str, function: Callable[..., Any]) -> int | None:
    """Return the position of a parameter after dout, q, k and v; None where there is none of that name."""
    names = list(inspect.signature(function).parameters)[4:]
    return names.index(name) if name in names else None


def _over(function: Any, names: dict[str, Any]) -> Callable[..., Any]:
    """Return a function with the same code and other globals."""
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


def _launching(names: Mapping[str, Any], stand_ins: list[Any], tensors: tuple[Any, Any]) -> dict[str, Any]:
    """Return factories of kernels that replace stand-ins by the real tensors at launch."""
    true = {id(stand_in): tensor for stand_in, tensor in zip(stand_ins, tensors, strict=True)}

    def swapping(factory: Callable[..., Any]) -> Callable[..., Any]:
        def make_kernel(*shape: Any, **options: Any) -> Callable[..., Any]:
            kernel = factory(*shape, **options)

            def launch(*arguments: Any) -> Any:
                if sum(id(each) in true for each in arguments) != len(true):
                    raise RuntimeError("a MIMO backward kernel is not launched with q and k, each of them once")
                return kernel(*(true.get(id(each), each) for each in arguments))

            return launch

        return make_kernel

    return {name: swapping(names[name]) for name in FACTORIES}


# The witness and the self-test run upstream's host code on the CPU, with kernels of our own

_BATCH, _SEQUENCE, _RANK, _HEADS, _DIM, _VALUE_DIM, _CHUNK = 1, 4, 2, 4, 6, 5, 2
_GROUPS = 2


class _Rehearsal:
    """Stub kernels that write known gradients per head, and record their queries and keys."""

    def __init__(self) -> None:
        import torch

        shape = (_BATCH, _SEQUENCE, _RANK, _HEADS, _DIM)
        count = torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device="cpu").view(shape)
        self.dq, self.dk = count % 7 - 3, count % 11 - 5
        self.launched: list[tuple[Any, Any]] = []
        helpers = {
            name + suffix: answer
            for suffix in ("", "_varlen")
            for name, answer in (
                ("bwd_dtrap_ddt_triton", lambda *_: (None, None)),
                ("bwd_dadt_fused_triton", lambda *_: 0.0),
            )
        }
        forward, backward = FACTORIES
        self.names = {
            forward: lambda *_: self._remember,
            backward: lambda *_: self._write,
            "T": SimpleNamespace(dynamic=str),
            **helpers,
        }

    def _remember(self, *tensors: Any) -> None:
        self.launched.append((tensors[1], tensors[2]))

    def _write(self, *tensors: Any) -> None:
        self._remember(*tensors)
        per_head = (_BATCH, _SEQUENCE * _RANK, _HEADS, _DIM)
        dk, dq = (each for each in tensors if getattr(each, "shape", None) == per_head)
        dk.copy_(self.dk.view(per_head))
        dq.copy_(self.dq.view(per_head))


def _arguments(symbol: str, groups: int) -> list[Any]:
    import torch

    def zeros(*shape: int) -> Any:
        return torch.zeros(shape, dtype=torch.float32, device="cpu")

    q, k = (zeros(_BATCH, _SEQUENCE, _RANK, groups, _DIM) for _ in range(2))
    v, z = (zeros(_BATCH, _SEQUENCE, _HEADS, _VALUE_DIM) for _ in range(2))
    bias = zeros(_HEADS, _RANK, _DIM)
    projection = zeros(_HEADS, _RANK, _VALUE_DIM)
    steps = zeros(_BATCH, _HEADS, _SEQUENCE)
    angles = zeros(_BATCH, _SEQUENCE, _HEADS, _DIM // 2)
    arguments = [v, q, k, v, bias, bias, projection, projection, z, projection, angles]
    arguments += [steps, steps, steps, steps, zeros(_HEADS), steps, _CHUNK, 2, torch.float32]
    return [*arguments, torch.tensor([0, 1, 4], dtype=torch.int32)] if symbol == feature.VARLEN.symbol else arguments


def _witness(symbol: str) -> Callable[[ModuleType], Observation]:
    def witness(module: ModuleType) -> Observation:
        """Run upstream with one, two and four groups of four heads: broken if only two groups raise and the others are right."""
        import torch

        if REDUCE in vars(module)[symbol].__code__.co_names:  # main's host code, whose sums are a kernel
            return Observation(broken=False, seen=f"sums with {REDUCE}, which is not rehearsed without a GPU")
        said = {}
        with torch.inference_mode(mode=False), torch.no_grad():
            for groups in (1, _GROUPS, _HEADS):
                rehearsal = _Rehearsal()
                try:
                    host = _over(vars(module)[symbol], vars(module) | rehearsal.names)
                    result = host(*_arguments(symbol, groups))
                except ValueError as error:
                    said[groups] = str(error)
                else:
                    said[groups] = _wrong(result, rehearsal, groups) or "right"
        broken = said[1] == said[_HEADS] == "right" and f"G value of {_GROUPS} " in said[_GROUPS]
        return Observation(broken=broken, seen="; ".join(f"G = {groups}: {result}" for groups, result in said.items()))

    return witness


def _self_test(symbol: str) -> Callable[[ModuleType], Observation]:
    def self_test(module: ModuleType) -> Observation:
        """Run the public entry with two groups of four heads."""
        import torch

        rehearsal = _Rehearsal()
        arguments = _arguments(symbol, _GROUPS)
        token = _rehearsed.set(rehearsal.names)
        try:
            with torch.inference_mode(mode=False), torch.no_grad():
                result = getattr(module, symbol)(*arguments)
        finally:
            _rehearsed.reset(token)
        wrong = _wrong(result, rehearsal, _GROUPS)
        if [id(each) for pair in rehearsal.launched for each in pair] != [id(each) for each in arguments[1:3]] * 2:
            wrong = "the kernels are not launched with q and k"
        return Observation(broken=wrong is not None, seen=wrong or f"{_GROUPS} groups of {_HEADS} heads: right")

    return self_test


def _wrong(result: Any, rehearsal: _Rehearsal, groups: int) -> str | None:
    """Return a description of the first error in a result, or None. Gradients are small integers, so the comparison is exact."""
    for name, found, per_head in (("dq", result[0], rehearsal.dq), ("dk", result[1], rehearsal.dk)):
        if not found.equal(per_head.unflatten(3, (groups, -1)).sum(4)):
            return f"{name} is not the sum over the heads of a group"
    for name, found, per_head in (("dq_bias", result[6], rehearsal.dq), ("dk_bias", result[7], rehearsal.dk)):
        if not found.equal(per_head.sum((0, 1)).transpose(0, 1)):
            return f"{name} is not the sum of the gradients of each head"
    return None if len(result) == 14 else f"{len(result)} results"


# Declarations


def _part(target: Target, probe: Callable[[SourceTree], Finding]) -> Overlay:
    return Overlay(
        id="mamba3-mimo-gqa-backward",
        pack=5,
        title="sum the gradients of Mamba-3 MIMO heads into any number of groups that divides them",
        target=target,
        probe=probe,
        replacements={feature.ONE_OR_ALL: (Replacement(symbol=target.symbol, make=_make),)},
        unsupported={},
        witness=_witness(target.symbol),
        self_test=_self_test(target.symbol),
        opt_in=False,
        symptoms=(
            "first backward of Mamba-3 MIMO raises",
            "error about ngroups and nheads in Mamba-3",
        ),
        concerns="mamba3",
        breaks="the first backward pass of a Mamba-3 MIMO layer with 1 < ngroups < nheads raises",
        brief="gradients with 1 < ngroups < nheads",
        until="mamba-ssm sums them into groups",
        retire_when="every supported mamba-ssm sums gradients into any number of groups that divides the heads",
        threads=(Thread(repository="state-spaces/mamba", number=967, state="merged to main 2026-06-08, unreleased"),),
        last_validated="2026-11-21, H200, torch 2.11.0+cu130, triton 3.6.0, tilelang 0.1.8: mamba-ssm 2.3.2.post1, both variants; "
        "main e9594ce read",
    )


PARTS = (_part(feature.PLAIN, feature.probe_plain), _part(feature.VARLEN, feature.probe_varlen))
