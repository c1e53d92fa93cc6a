"""DSA's absorbed attention without fused kernels: are scores of (batch, heads, queries, keys) ever there?

On the CPU every operator is watched, also those inside custom ones, and new tensors with as many elements as all scores
are counted. On the GPU the peak of memory is compared with the bytes of one such tensor in float32. Values and gradients are
compared with float64, so that memory saved by computing something else shows as a failure. Queries see keys up to their own
place, and a fifth of the slots is empty.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

_DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
_FUNCTION = "_unfused_absorbed_dsa_fn"
_MIB = 1 << 20
_TOLERANCE = 1e-2
"""Relative, in the Frobenius norm: bfloat16 in and out."""
_NAMES = ("output", "query", "key")


class Sizes(NamedTuple):
    """Sizes of one problem, in bfloat16, with a batch of one."""

    queries: int
    keys: int
    heads: int
    dim: int
    value: int
    slots: int

    @property
    def all_scores(self) -> int:
        """Elements of the tensor that is asked after."""
        return self.heads * self.queries * self.keys

    def __str__(self) -> str:
        return f"{self.queries} x {self.keys}, {self.heads} heads, {self.dim}/{self.value} channels, top-k {self.slots}"


def _attention() -> Callable[..., Any]:
    try:
        dsa = importlib.import_module(_DSA)
    except ModuleNotFoundError as error:
        if not _DSA.startswith(str(error.name)):
            raise Blocked(f"{_DSA} cannot be imported without {error.name}") from error
        raise TargetAbsent(f"there is no {_DSA}") from error
    if (function := getattr(dsa, _FUNCTION, None)) is None:
        raise TargetAbsent(f"there is no {_FUNCTION}")
    return function  # type: ignore[no-any-return]


def _inputs(sizes: Sizes, device: str) -> tuple[list[Any], Any, Any]:
    """Return query and key, ready for gradients, what each query chose, and a gradient of the output."""
    import torch

    generator = torch.Generator(device).manual_seed(47)
    shapes = ((sizes.queries, 1, sizes.heads, sizes.dim), (sizes.keys, 1, 1, sizes.dim))
    leaves = [
        torch.randn(shape, generator=generator, device=device).bfloat16().requires_grad_() for shape in shapes
    ]
    score = torch.rand((1, sizes.queries, sizes.keys), generator=generator, device=device)
    chosen = score.topk(sizes.slots, dim=-1).indices
    chosen = chosen.masked_fill(torch.rand(chosen.shape, generator=generator, device=device) < 0.2, -1)
    above = torch.randn(
        (sizes.queries, 1, sizes.heads, sizes.value), generator=generator, device=device
    ).bfloat16()
    return leaves, chosen, above


def _bounds(sizes: Sizes, device: str) -> dict[str, Any]:
    """Return the bounds that a causal layer gives: as many more keys as there are than queries were before them."""
    import torch

    ends = torch.arange(sizes.queries, device=device) + 1 + sizes.keys - sizes.queries
    return {"varlen_starts": torch.zeros_like(ends), "varlen_ends": ends}


def _step(attention: Callable[..., Any], sizes: Sizes, device: str) -> tuple[Callable[[], tuple[Any, ...]], Any]:
    """Return a step, forward and backward, and the truth of its results."""
    import torch

    leaves, chosen, above = _inputs(sizes, device)
    bounds, scale = _bounds(sizes, device), sizes.dim**-0.5

    def step() -> tuple[Any, ...]:
        output = attention(*leaves, chosen, scale, sizes.value, **bounds)
        return output.detach(), *torch.autograd.grad(output, leaves, above)

    counts = (chosen >= 0) & (chosen < bounds["varlen_ends"][:, None])
    return step, _truth(leaves, chosen.masked_fill(~counts, -1), above, scale)


def _truth(leaves: Sequence[Any], chosen: Any, above: Any, scale: float) -> list[Any]:
    """Return output and gradients in float64, for some queries at once."""
    import torch

    query, key = (each.detach().double() for each in leaves)
    output, of_query, of_key = above.double(), torch.zeros_like(query), torch.zeros_like(key)
    value, step = above.size(-1), max(1, 64)
    for first in range(0, query.size(0), step):
        rows = slice(first, first + step)
        picked = chosen[0, rows].clamp(min=0)
        keys, hidden = key[picked, 0, 0], (chosen[0, rows] < 0)[:, None]
        scores = torch.einsum("shd,std->sht", query[rows, 0], keys) * scale
        scores = scores.masked_fill(hidden, -torch.inf)
        shares = torch.softmax(scores, dim=-1).nan_to_num(0.0)  # of nothing
        grad = above[rows, 0].double()
        output[rows, 0] = torch.einsum("sht,stv->shv", shares, keys[..., :value])
        of_shares = torch.einsum("shv,stv->sht", grad, keys[..., :value])
        of_scores = shares * (of_shares - (shares * of_shares).sum(-1, keepdim=True)) * scale
        of_query[rows, 0] = torch.einsum("sht,std->shd", of_scores, keys)
        of_keys = torch.einsum("sht,shd->std", of_scores, query[rows, 0])
        of_keys[..., :value] += torch.einsum("sht,shv->stv", shares, grad)
        of_key[:, 0, 0].index_put_((picked,), of_keys, accumulate=True)
    return [output, of_query, of_key]


def _errors(found: Sequence[Any], true: Sequence[Any]) -> str:
    """Say the relative errors.

    Raises:
        ArithmeticError: a value or a gradient is wrong. This is no verdict on memory.
    """
    errors = [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, true, strict=True)]
    said = ", ".join(f"{name} {error:.1e}" for name, error in zip(_NAMES, errors, strict=True))
    if not max(errors) <= _TOLERANCE:
        raise ArithmeticError(f"relative errors against float64: {said}")
    return f"relative errors against float64: {said}"


def _cpu() -> Behaviour:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    on_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # noqa: SLF001 - there is no public name
    sizes = Sizes(512, 768, 32, 96, 64, 16)

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        """Sees the outputs of operators, also of those that a custom operator is made of."""

        many = most = 0

        def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operator.namespace == "aten":
                result = operator(*args, **(kwargs or {}))
            else:
                with self:  # torch watches no further than the first operator; on its own key it is none
                    result = operator.redispatch(on_cpu, *args, **(kwargs or {}))
            for each in tree_leaves(result):
                if isinstance(each, torch.Tensor):
                    self.most = max(self.most, each.numel())
                    self.many += each.numel() >= sizes.all_scores
            return result

    step, true = _step(_attention(), sizes, "cpu")
    with Watch() as watch:
        found = step()
    seen = (
        f"{sizes}: {watch.many} operators of a step returned all {sizes.all_scores} scores or more; the largest result had "
        f"{watch.most} elements; {_errors(found, true)}"
    )
    return Behaviour(broken=watch.many > 0, seen=seen)


def _gpu() -> Behaviour:
    """Run a step of 4096 queries and keys with 128 heads of 576 channels."""
    import torch

    sizes = Sizes(4096, 4096, 128, 576, 512, 2048)
    needed = 7 * 4 * sizes.all_scores
    if (free := torch.cuda.mem_get_info()[0]) < needed:
        raise Blocked(f"{sizes}: needs {needed // _MIB} MiB of free device memory, and {free // _MIB} are free")
    step, true = _step(_attention(), sizes, "cuda")
    torch.cuda.empty_cache()
    peaks, times, found = [], [], None
    for _ in range(5):  # the first ones compile, and let libraries take their workspace
        found = None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start.record()
        found = step()
        end.record()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        times.append(start.elapsed_time(end))
    assert found is not None  # noqa: S101 - it ran
    peak = max(peaks[2:])
    seen = (
        f"a step of {sizes}: peak {peak // _MIB} MiB (all scores in float32: {4 * sizes.all_scores // _MIB}), "
        f"{statistics.median(times[2:]):.1f} ms, {_errors(found, true)}"
    )
    return Behaviour(broken=peak >= 4 * sizes.all_scores, seen=seen)


def _case(name: str, device: str, run: Callable[[], Behaviour]) -> Case:
    return Case(
        name=name,
        overlay="dsa-sparse-attention",
        device=device,
        versions=("megatron-core", "torch", "triton"),
        run=run,
    )


CASES = (_case("attention-cpu", "cpu", _cpu), _case("attention-gpu", "cuda", _gpu))
