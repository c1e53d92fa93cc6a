"""DSA index scores and the loss that trains them: is a tensor of (queries, batch, heads, keys) ever there?

The scores are (batch, queries, keys). On the CPU every operator is watched, also those inside custom ones, and new
tensors with as many elements as all four axes have are counted. On the GPU the peak of memory is compared with the
bytes of such a tensor in float32. Scores and gradients are compared with float64, so that memory saved by computing
something else shows as a failure.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

_DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
_MIB = 1 << 20
_TOLERANCES = {"scores": 1e-5, "loss": 1e-4, "q": 4e-3, "weights": 4e-3, "k": 4e-3}
"""Relative errors, in the Frobenius norm, that are no fault: float32 sums, and gradients rounded once to bfloat16."""


class Sizes(NamedTuple):
    """Sizes of one problem, all in bfloat16."""

    queries: int
    keys: int
    batch: int
    heads: int
    dim: int

    @property
    def four_axes(self) -> int:
        """Elements of the tensor that is asked after."""
        return self.queries * self.batch * self.heads * self.keys

    @property
    def scores(self) -> int:
        """Elements of the scores."""
        return self.batch * self.queries * self.keys

    def __str__(self) -> str:
        return f"{self.queries} x {self.keys}, b={self.batch}, {self.heads} heads, d={self.dim}"


# Upstream


def _dsa() -> Any:
    # Looked for before it is imported: some releases cannot be imported on every host.
    core = importlib.util.find_spec("megatron.core")
    below = Path(*_DSA.split(".")[2:]).with_suffix(".py")
    if core is None or not any(Path(folder, below).is_file() for folder in core.submodule_search_locations or ()):
        raise TargetAbsent(f"there is no {_DSA}")
    try:
        return importlib.import_module(_DSA)
    except ModuleNotFoundError as error:
        raise Blocked(f"{_DSA} cannot be imported without {error.name}") from error


def _scores_of(dsa: Any) -> Callable[..., Any]:
    """Return upstream's `(q, weights, k, ...)`: a function, or in 0.16 a method that never looks at its layer."""
    if (function := getattr(dsa, "_compute_index_scores", None)) is not None:
        return function  # type: ignore[no-any-return]
    method = getattr(getattr(dsa, "DSAIndexer", None), "_compute_index_scores", None)
    if method is None:
        raise TargetAbsent("there is no _compute_index_scores, neither as a function nor as a method of DSAIndexer")
    return lambda *tensors: method(None, *tensors)


def _ways(function: Callable[..., Any]) -> Sequence[dict[str, bool]]:
    """Return what to ask of a function: with and without ReLU, where it has the choice."""
    chooses = "use_relu" in inspect.signature(function).parameters
    return ({"use_relu": True}, {"use_relu": False}) if chooses else ({},)


def _loss_of(dsa: Any) -> tuple[Callable[..., Any], Sequence[dict[str, bool]]]:
    """Return the loss of a layer as `(q, weights, k, query, key, mask, topk, ...)`, and what to ask of it.

    The fused loss; in 0.16 the one that autograd takes through the scores.
    """
    group = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    fused = getattr(dsa, "FusedDSAIndexerLoss", None)
    if fused is None:
        scores = _scores_of(dsa)

        def unfused(q: Any, weights: Any, k: Any, query: Any, key: Any, mask: Any, topk: int) -> Any:
            index_scores = scores(q, weights, k) + mask
            chosen = index_scores.topk(topk, dim=-1)[1]
            return dsa.compute_dsa_indexer_loss(index_scores, chosen, query, key, _SCALE, _COEFFICIENT, False, group)

        return unfused, _ways(scores)

    parameters = list(inspect.signature(fused.forward).parameters.values())[1:]
    fixed = {"softmax_scale": _SCALE, "loss_coeff": _COEFFICIENT, "sparse_loss": False, "pg_collection": group}

    def loss(*tensors: Any, **asked: bool) -> Any:
        names = ("q", "weights", "k", "query", "key", "mask", "topk")
        given = {**fixed, **dict(zip(names, tensors, strict=True)), **asked}
        # Autograd's `apply` takes no names.
        return fused.apply(*(given.get(each.name, each.default) for each in parameters))[1]

    return loss, _ways(fused.forward)


_SCALE, _COEFFICIENT = 0.125, 0.5


# Inputs and truth


def _inputs(sizes: Sizes, device: str) -> list[Any]:
    """Return q, weights and k, in bfloat16, ready for gradients."""
    import torch

    generator = torch.Generator(device).manual_seed(12)
    shapes = (
        (sizes.queries, sizes.batch, sizes.heads, sizes.dim),
        (sizes.queries, sizes.batch, sizes.heads),
        (sizes.keys, sizes.batch, sizes.dim),
    )
    scales = (sizes.dim**-0.5, sizes.heads**-0.5, 1.0)
    made = (torch.randn(shape, generator=generator, device=device) * by for shape, by in zip(shapes, scales, strict=True))
    return [each.bfloat16().requires_grad_() for each in made]


def _attention(sizes: Sizes, device: str) -> tuple[Any, Any, Any]:
    """Return query and key of one attention head, (positions, batch, 1, 64), and a causal mask of zeros and -inf.

    One head, so that the attention's own (batch, heads, queries, keys) is no larger than the scores.
    """
    import torch

    generator = torch.Generator(device).manual_seed(13)
    query, key = (
        torch.randn(length, sizes.batch, 1, 64, generator=generator, device=device).bfloat16()
        for length in (sizes.queries, sizes.keys)
    )
    mask = torch.full((sizes.queries, sizes.keys), -math.inf, device=device).triu(1)
    return query, key, mask


def _true_scores(inputs: Sequence[Any], use_relu: bool) -> Any:
    """Return the scores in float64, (batch, queries, keys)."""
    q, weights, k = (each.detach().double() for each in inputs)
    total = q.new_zeros(q.size(1), q.size(0), k.size(0))
    for head, products in _products(q, k):
        total += (products.relu() if use_relu else products) * weights[:, :, head].T[:, :, None]
    return total


def _true_gradients(grad: Any, inputs: Sequence[Any], use_relu: bool) -> dict[str, Any]:
    """Return the gradients of q, weights and k in float64, for a gradient of the scores."""
    import torch

    q, weights, k = (each.detach().double() for each in inputs)
    of_q, of_weights, of_k = torch.zeros_like(q), torch.zeros_like(weights), torch.zeros_like(k)
    for head, products in _products(q, k):
        live = grad * (products > 0) if use_relu else grad
        of_weights[:, :, head] = (live * products).sum(dim=-1).T
        live = live * weights[:, :, head].T[:, :, None]
        of_q[:, :, head] = torch.einsum("bst,tbd->sbd", live, k)
        of_k += torch.einsum("bst,sbd->tbd", live, q[:, :, head])
    return {"q": of_q, "weights": of_weights, "k": of_k}


def _products(q: Any, k: Any) -> Iterator[tuple[int, Any]]:
    import torch

    return ((head, torch.einsum("sbd,tbd->bst", q[:, :, head], k)) for head in range(q.size(2)))


def _true_loss(scores: Any, query: Any, key: Any, mask: Any) -> tuple[Any, Any]:
    """Return the loss in float64 and its gradient at the scores: the mean divergence of a row from the attention's."""
    import torch

    mask = mask.double()
    attention = torch.einsum("sbnd,tbnd->bst", query.double(), key.double()) * _SCALE
    target, predicted = torch.softmax(attention + mask, -1), torch.log_softmax(scores + mask, -1)
    rows = scores.size(0) * scores.size(1)
    seen = mask == 0
    divergence = torch.where(seen, target * (target.log() - predicted), 0.0)
    return divergence.sum() * (_COEFFICIENT / rows), (predicted.exp() - target) * (_COEFFICIENT / rows)


def _check(found: dict[str, Any], true: dict[str, Any]) -> dict[str, float]:
    """Return the relative errors by name.

    Raises:
        ArithmeticError: a value or a gradient is wrong. This is no verdict on memory.
    """
    errors = {name: float((found[name].double() - value).norm() / value.norm()) for name, value in true.items()}
    if wrong := [f"{name} {error:.1e}" for name, error in errors.items() if not error <= _TOLERANCES[name]]:
        raise ArithmeticError(f"relative errors against float64: {', '.join(wrong)}")
    return errors


def _gradients(inputs: Sequence[Any]) -> dict[str, Any]:
    """Return the gradients that have arrived, and forget them."""
    found = {name: each.grad for name, each in zip(("q", "weights", "k"), inputs, strict=True)}
    for each in inputs:
        each.grad = None
    return found


# CPU, operator by operator


class Count(NamedTuple):
    """How many new tensors were too large, and the most elements that one had."""

    many: int
    most: int


def _watched(work: Callable[[], Any], least: int) -> tuple[Any, Count]:
    """Run `work`; return its result and the count of new tensors of `least` elements or more."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    on_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # noqa: SLF001 - there is no public name

    def memory(tensor: Any) -> int:
        return int(tensor.untyped_storage().data_ptr())

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        """Sees the outputs of operators, also of those that a custom operator is made of."""

        many = most = 0

        def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operator.namespace == "aten":
                result = operator(*args, **(kwargs or {}))
            else:
                with self:  # torch watches no further than the first operator; on its own key it is none
                    result = operator.redispatch(on_cpu, *args, **(kwargs or {}))
            given = {memory(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
            for each in tree_leaves(result):
                if isinstance(each, torch.Tensor) and memory(each) not in given:
                    self.most = max(self.most, each.numel())
                    self.many += each.numel() >= least
            return result

    with Watch() as watch:
        result = work()
    return result, Count(watch.many, watch.most)


def _scores_cpu() -> Behaviour:
    sizes = Sizes(384, 640, 2, 8, 64)
    compute = _scores_of(_dsa())
    inputs = _inputs(sizes, "cpu")

    def measure(asked: dict[str, bool]) -> tuple[Count, Count]:
        grad = _grad(sizes, "cpu")
        scores, forward = _watched(lambda: compute(*inputs, **asked), sizes.four_axes)
        _, backward = _watched(lambda: scores.backward(grad), sizes.four_axes)
        use_relu = asked.get("use_relu", True)
        true = {"scores": _true_scores(inputs, use_relu), **_true_gradients(grad.double(), inputs, use_relu)}
        errors.append(_check({"scores": scores.detach(), **_gradients(inputs)}, true))
        return forward, backward

    errors: list[dict[str, float]] = []
    return _counted(sizes, [measure(asked) for asked in _ways(compute)], errors)


def _loss_cpu() -> Behaviour:
    sizes = Sizes(512, 512, 2, 8, 64)
    loss, ways = _loss_of(_dsa())
    inputs, (query, key, mask) = _inputs(sizes, "cpu"), _attention(sizes, "cpu")

    def measure(asked: dict[str, bool]) -> tuple[Count, Count]:
        found, forward = _watched(lambda: loss(*inputs, query, key, mask, 128, **asked), sizes.four_axes)
        _, backward = _watched(lambda: found.backward(), sizes.four_axes)
        errors.append(_check_loss(found, inputs, query, key, mask, asked.get("use_relu", True)))
        return forward, backward

    errors: list[dict[str, float]] = []
    return _counted(sizes, [measure(asked) for asked in ways], errors)


def _counted(
    sizes: Sizes, counts: Sequence[tuple[Count, Count]], errors: Sequence[dict[str, float]]
) -> Behaviour:
    """Say what was counted: per way, forward and backward, how many tensors were too large and how large one was."""
    ways = ("with ReLU", "without") if len(counts) > 1 else ("with ReLU",)
    many = [
        f"{way} {forward.many} in the forward and {backward.many} in the backward pass"
        for way, (forward, backward) in zip(ways, counts, strict=True)
    ]
    most = max(count.most for pair in counts for count in pair)
    seen = (
        f"{sizes}: new tensors of {sizes.four_axes} elements or more, {'; '.join(many)}; the largest had {most}, "
        f"the scores have {sizes.scores}; {_errors_in_words(*errors)}"
    )
    return Behaviour(broken=most >= sizes.four_axes, seen=seen)


def _grad(sizes: Sizes, device: str) -> Any:
    """Return a gradient of the scores, (batch, queries, keys)."""
    import torch

    generator = torch.Generator(device).manual_seed(14)
    return torch.randn(sizes.batch, sizes.queries, sizes.keys, generator=generator, device=device)


def _check_loss(loss: Any, inputs: Sequence[Any], query: Any, key: Any, mask: Any, use_relu: bool) -> dict[str, float]:
    value, grad = _true_loss(_true_scores(inputs, use_relu), query, key, mask)
    true = {"loss": value, **_true_gradients(grad, inputs, use_relu)}
    return _check({"loss": loss.detach(), **_gradients(inputs)}, true)


# GPU, by peak and time


def _scores_gpu() -> Behaviour:
    """Ask for the scores alone where they are largest, and for scores and gradients at a quarter of the batch."""
    import torch

    compute = _scores_of(_dsa())
    broken, seen = False, []
    for batch, trains in ((8, False), (2, True)):
        sizes = Sizes(4096, 4096, batch, 32, 128)
        _need(sizes, 5 if trains else 2.5)
        inputs, grad = _inputs(sizes, "cuda"), _grad(sizes, "cuda") if trains else None

        def work(inputs: Sequence[Any] = inputs, grad: Any = grad) -> Any:
            with torch.set_grad_enabled(grad is not None):
                scores = compute(*inputs)
            if grad is not None:
                scores.backward(grad)
            return scores.detach()

        scores, peak, milliseconds = _peak_and_time(work, inputs)
        found, true = {"scores": scores}, {"scores": _true_scores(inputs, True)}
        if grad is not None:
            found |= _gradients(inputs)
            true |= _true_gradients(grad.double(), inputs, True)
        errors = _check(found, true)
        what = "scores and gradients" if trains else "scores"
        seen.append(f"{what} of {sizes}: {_in_words(sizes, peak, milliseconds, errors)}")
        broken |= peak >= 4 * sizes.four_axes
        del inputs, grad, work, scores, found, true
    return Behaviour(broken=broken, seen="; ".join(seen))


def _loss_gpu() -> Behaviour:
    """Run a whole step of an indexer: scores, the best 2048 keys, the loss, and gradients."""
    sizes = Sizes(4096, 4096, 2, 32, 128)
    _need(sizes, 8)
    loss, _ = _loss_of(_dsa())
    inputs, (query, key, mask) = _inputs(sizes, "cuda"), _attention(sizes, "cuda")

    def work() -> Any:
        found = loss(*inputs, query, key, mask, 2048)
        found.backward()
        return found.detach()

    found, peak, milliseconds = _peak_and_time(work, inputs)
    errors = _check_loss(found, inputs, query, key, mask, True)
    seen = f"a step of {sizes}: {_in_words(sizes, peak, milliseconds, errors)}"
    return Behaviour(broken=peak >= 4 * sizes.four_axes, seen=seen)


def _need(sizes: Sizes, tensors: float) -> None:
    """Decline a device that has no room for some float32 tensors of four axes and the float64 truth."""
    import torch

    torch.cuda.empty_cache()
    free, needed = torch.cuda.mem_get_info()[0], int(tensors * 4 * sizes.four_axes)
    if free < needed:
        raise Blocked(f"{sizes}: needs {needed // _MIB} MiB of free device memory, and {free // _MIB} are free")


def _peak_and_time(work: Callable[[], Any], inputs: Sequence[Any]) -> tuple[Any, int, float]:
    """Run `work` five times; return its last result, the bytes that it had at once, and the median in milliseconds.

    The first runs compile and let libraries take their workspace.
    """
    import torch

    peaks, times, result = [], [], None
    for _ in range(5):
        result = None
        _gradients(inputs)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start.record()
        result = work()
        end.record()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        times.append(start.elapsed_time(end))
    return result, max(peaks[2:]), statistics.median(times[2:])


def _in_words(sizes: Sizes, peak: int, milliseconds: float, errors: dict[str, float]) -> str:
    return (
        f"peak {peak / _MIB:.0f} MiB (four axes in float32: {4 * sizes.four_axes // _MIB}, "
        f"scores: {4 * sizes.scores // _MIB}), {milliseconds:.1f} ms, {_errors_in_words(errors)}"
    )


def _errors_in_words(*found: dict[str, float]) -> str:
    worst = (f"{name} {max(errors[name] for errors in found):.1e}" for name in found[0])
    return f"relative errors against float64: {', '.join(worst)}"


def _case(name: str, device: str, run: Callable[[], Behaviour]) -> Case:
    return Case(
        name=name,
        overlay="dsa-indexer-streaming",
        device=device,
        versions=("megatron-core", "torch", "triton"),
        run=run,
        fix_sentinel="MEMORY_SAVE_VERIFIED",
    )


CASES = (
    _case("scores-cpu", "cpu", _scores_cpu),
    _case("indexer-loss-cpu", "cpu", _loss_cpu),
    _case("scores-gpu", "cuda", _scores_gpu),
    _case("indexer-loss-gpu", "cuda", _loss_gpu),
)
