"""Limit of 2**31 elements on tensors that Mamba-2's Triton kernels index with 32 bits.

Offsets in these kernels are products of 32 bits. Elements beyond 2**31 are read from, and written to, addresses before
the tensor: results are wrong without an error, or the run ends with an illegal access. A view counts with its whole span: `dt` and
`z` are views of the input projection, so 95 thousand tokens are too many where the projection is 22656 wide, in one row or in several.

Where a tensor spans too much, the wrappers of upstream's functions make views contiguous, and split the rows of a batch, or of the
gated norm, into groups. Rows of the norm are independent. Where one row of a batch is still too large, the
pass ends in an error with advice. Any other call is upstream's own with the caller's arguments.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import mamba2_int32_offsets as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime.in_this_thread import Instead, answer

LIMIT = 2**31
"""Elements: the first offset that overflows 32 bits."""
_BLOCK = 32
"""The smallest tile of tokens, channels or states for which a kernel keeps a partial sum."""

_READ = ("x", "dt", "B", "C", "z", "out", "dout")
_WRITTEN = ("dx", "ddt", "dB", "dC", "dz")
_OF_ROWS = (*_READ, *_WRITTEN, "initial_states", "dfinal_states", "seq_idx")
"""Arguments whose first axis is the batch."""
_PLACES = {0: "dx", 1: "ddt", 3: "dB", 4: "dC", 6: "dz"}
"""Results of a backward pass for which its caller may pass an output tensor, by position."""
_SUMS = {2: "dA", 5: "dD", 7: "ddt_bias"}
"""Results of a backward pass that are sums over the batch, by position."""


def reach(tensor: Any) -> int:
    """Return the distance in elements from the first element of a tensor to its last."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _make_forward(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    parameters = inspect.signature(original)

    def _mamba_chunk_scan_combined_fwd(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs).arguments
        rows, group = given["x"].shape[0], _group(given)
        if group == rows and not _far(given):
            return original(*args, **kwargs)
        found = [original(**_near(each)) for each in _in_groups(given, rows, group)]
        return found[0] if len(found) == 1 else tuple(_together(each) for each in zip(*found, strict=True))

    return _mamba_chunk_scan_combined_fwd


def _make_backward(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    parameters = inspect.signature(original)

    def _mamba_chunk_scan_combined_bwd(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs).arguments
        rows, group = given["x"].shape[0], _group(given, backward=True)
        if group == rows and not _far(given):
            return original(*args, **kwargs)
        found = []
        for own in _in_groups(given, rows, group):
            near = _near(own)
            found.append(original(**near))
            for name in _WRITTEN:
                if own.get(name) is not near.get(name):
                    own[name].copy_(near[name])
        places = range(len(found[0]))
        results = [_together([each[place] for each in found], summed=place in _SUMS) for place in places]
        for place, result in _PLACES.items():
            if given.get(result) is not None:
                results[place] = given[result]  # upstream writes to a given tensor, and returns it
        return tuple(results)

    return _mamba_chunk_scan_combined_bwd


def _far(given: Mapping[str, Any]) -> list[str]:
    return [name for name in (*_READ, *_WRITTEN) if given.get(name) is not None and reach(given[name]) >= LIMIT]


def _near(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments whose spans are below the limit: inputs are copied, and outputs replaced by new tensors."""
    import torch

    near = dict(given)
    for name in _far(given):
        whole = given[name]
        near[name] = (
            whole.contiguous() if name in _READ else torch.empty_like(whole, memory_format=torch.contiguous_format)
        )
    return near


def _in_groups(given: dict[str, Any], rows: int, group: int) -> list[dict[str, Any]]:
    """Return the arguments for some rows of the batch at a time."""
    if group == rows:
        return [given]
    places = [slice(first, first + group) for first in range(0, rows, group)]
    of_rows = {name: given[name] for name in _OF_ROWS if given.get(name) is not None}
    return [{**given, **{name: each[place] for name, each in of_rows.items()}} for place in places]


def _together(results: Any, *, summed: bool = False) -> Any:
    """Combine the results for groups of rows into the result for the batch: a concatenation, or a sum."""
    import torch

    if results[0] is None or len(results) == 1:
        return results[0]
    if summed:
        return sum(each.float() for each in results).to(results[0].dtype)
    return torch.cat(list(results))


def _group(given: Mapping[str, Any], *, backward: bool = False) -> int:
    """Return the number of rows of the batch that a pass can take at a time.

    Raises:
        RuntimeError: a single row is too large.
    """
    group: int = given["x"].shape[0]
    while (most := _most(given, group, backward=backward))[1] >= LIMIT and group > 1:
        group = (group + 1) // 2
    largest, elements = most
    if elements >= LIMIT:
        tokens = given["x"].shape[1]
        raise RuntimeError(
            f"mamba-ssm's kernels index {largest} of one row of {tokens} tokens, {elements} elements, with 32 bits, which hold "
            f"{LIMIT}: results would be wrong without an error. Use shorter rows, context or tensor parallelism, "
            f"or another chunk_size than {given['chunk_size']}; MEGACPP_OVERLAY_MAMBA2_INT32_OFFSETS=off lets it run"
        )
    return group


def _most(given: Mapping[str, Any], rows: int, *, backward: bool) -> tuple[str, int]:
    """Return the name and number of elements of the largest contiguous tensor that kernels index for some rows."""
    _, tokens, heads, width = given["x"].shape
    _, _, groups, states = given["B"].shape
    size = given["chunk_size"]
    chunks = rows * math.ceil(tokens / size)
    found = {
        "states": chunks * heads * width * states,
        "scores": chunks * groups * size * size,
        "outputs": rows * tokens * heads * width,
        "keys": rows * tokens * groups * states,
    }
    if (bounds := given.get("cu_seqlens")) is not None:
        found["states of documents"] = (bounds.shape[0] - 1) * heads * width * states
    if backward:
        tiles = max(math.ceil(each / _BLOCK) for each in (size, width, states))
        found["gradients of decays"] = chunks * heads * size * tiles
    return max(found.items(), key=lambda each: each[1])


def _make_norm_forward(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    parameters = inspect.signature(original)

    def _layer_norm_fwd(*args: Any, **kwargs: Any) -> Any:
        import torch

        given = parameters.bind(*args, **kwargs).arguments
        x = given["x"]
        pieces = _pieces(x, given.get("z"), given.get("out"))
        if len(pieces) == 1:
            return original(*args, **kwargs)
        out = given["out"] if given.get("out") is not None else torch.empty_like(x)
        found = []
        for piece in pieces:
            own = _in_piece(given, piece, "x", "z")
            found.append(original(**{**given, **own, "out": out[piece]}))
        _, means, deviations = zip(*found, strict=True)
        return out, _by_groups(means, pieces), _by_groups(deviations, pieces)

    return _layer_norm_fwd


def _make_norm_backward(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    parameters = inspect.signature(original)

    def _layer_norm_bwd(*args: Any, **kwargs: Any) -> Any:
        import torch

        given = parameters.bind(*args, **kwargs).arguments
        x, z = given["x"], given.get("z")
        pieces = _pieces(x, z, *(given.get(name) for name in ("dy", "dz", "out")))
        if len(pieces) == 1:
            return original(*args, **kwargs)
        whole = dict(given)
        if z is not None and given.get("dz") is None:
            whole["dz"] = torch.empty_like(z)
        if given.get("recompute_output") and given.get("out") is None:
            whole["out"] = torch.empty_like(x)
        dx = torch.empty_like(x)
        found = []
        for piece in pieces:
            own = _in_piece(whole, piece, "dy", "x", "z", "dz", "out")
            kept = {name: given[name] for name in ("mean", "rstd") if given[name] is not None}
            own |= {name: each.view(-1, x.shape[0])[:, piece].reshape(-1) for name, each in kept.items()}
            results = original(**{**whole, **own})
            dx[piece] = results[0]
            found.append(results[1:3])
        sums = [_together(each, summed=True) for each in zip(*found, strict=True)]
        more = [whole["out"]] if given.get("recompute_output") else []
        return (dx, *sums, whole.get("dz"), *more)

    return _layer_norm_bwd


def _pieces(*tensors: Any) -> list[slice]:
    """Return the slices of rows that kernels can take at a time. Rows are the first of two axes."""
    rows, width = tensors[0].shape
    stride = max([width, *(each.stride(0) for each in tensors if each is not None)])
    most = max((LIMIT - 1) // stride, 1)
    return [slice(first, min(first + most, rows)) for first in range(0, rows, most)] or [slice(0, 0)]


def _in_piece(given: Mapping[str, Any], piece: slice, *names: str) -> dict[str, Any]:
    """Return the named arguments that are not None, restricted to a slice of the rows."""
    return {name: given[name][piece] for name in names if given.get(name) is not None}


def _by_groups(values: Any, pieces: list[slice]) -> Any:
    """Concatenate statistics of all slices of rows, one group of channels after the other."""
    if values[0] is None:
        return None
    groups = values[0].numel() // pieces[0].stop
    whole = values[0].new_empty((groups, pieces[-1].stop))
    for each, piece in zip(values, pieces, strict=True):
        whole[:, piece] = each.view(groups, -1)
    return whole.view(-1)


# The witness and the self-test run upstream's host code up to the first kernels, with tensors that have no memory.
# They avoid operations for which PyTorch's meta device imports Python code, such as `clone` and `empty_like`: the import takes seconds.

_TOKENS, _WIDTH = 2**12, 2**20
_HEADS, _DIM, _STATE, _CHUNK = 2, 16, 16, 256


class _EndError(Exception):
    """Signal that ends upstream's function after the last kernel that is observed."""


def observe_scan(module: ModuleType) -> Observation:
    """Measure the largest span of kernel arguments when both passes get views of a wide buffer."""
    import torch

    wide = torch.empty((1, _TOKENS, _WIDTH), dtype=torch.float32, device="meta")
    x = wide[..., : _HEADS * _DIM].unflatten(-1, (_HEADS, _DIM))
    keys = wide[..., :_STATE].unflatten(-1, (1, _STATE))
    dt, decay = wide[..., :_HEADS], torch.empty(_HEADS, device="meta")
    here = torch.empty(dt.shape, dtype=torch.float32, device="cpu")  # upstream clones it
    slopes = torch.empty(keys.shape, dtype=torch.float32, device="meta")
    seen: list[Any] = []

    def remember(*tensors: Any, **_: Any) -> Any:
        seen.extend(each for each in tensors if getattr(each, "ndim", 0) >= dt.ndim)
        return decay, decay

    def end(*tensors: Any, **_: Any) -> Any:
        remember(*tensors)
        raise _EndError

    steps = {"_chunk_cumsum_fwd": remember, "_bmm_chunk_fwd": remember, "_chunk_state_fwd": end}
    with _with(module, **{name: answer(ours, vars(module)[name]) for name, ours in steps.items()}):
        with contextlib.suppress(_EndError):
            vars(module)[feature.FORWARD](x, dt, decay, keys, keys, _CHUNK)
        with contextlib.suppress(_EndError):
            vars(module)[feature.BACKWARD](x, x, here, decay, keys, keys, x, _CHUNK, dB=slopes, dC=slopes)
    return _seen([reach(each) for each in seen])


def observe_norm(module: ModuleType) -> Observation:
    """Measure the largest span of kernel arguments when both passes of the norm get a gate in a wide buffer."""
    import torch

    x, weight, deviation = (
        torch.ones(shape, dtype=torch.float32, device="cpu") for shape in ((_TOKENS, _DIM), (_DIM,), (_TOKENS,))
    )
    gate = torch.empty((_TOKENS, _WIDTH), dtype=torch.float32, device="meta")[:, :_DIM]
    seen: list[int] = []

    def launch(*arguments: Any, **_: Any) -> None:
        seen.extend(reach(each) for each in arguments if getattr(each, "ndim", 0) == x.ndim)

    kernels = {
        name: _Kernel(vars(module)[name], launch) for name in ("_layer_norm_fwd_1pass_kernel", "_layer_norm_bwd_kernel")
    }
    theirs = vars(module)["torch"]
    cuda = Instead(
        theirs.cuda,
        device=answer(lambda *_: contextlib.nullcontext(), theirs.cuda.device),
        get_device_properties=answer(
            lambda *_: SimpleNamespace(multi_processor_count=1), theirs.cuda.get_device_properties
        ),
    )
    with _with(module, torch=Instead(theirs, cuda=cuda), **kernels):
        vars(module)[feature.NORM_FORWARD](x, weight, None, 1e-6, z=gate, is_rms_norm=True)
        vars(module)[feature.NORM_BACKWARD](
            x, x, weight, None, 1e-6, None, deviation, z=gate, is_rms_norm=True, dz=gate
        )
    return _seen(seen)


def _seen(reached: list[int]) -> Observation:
    furthest = max(reached)
    return Observation(
        broken=furthest >= LIMIT, seen=f"kernels are launched with tensors that span {furthest} elements"
    )


class _Kernel:
    """Replacement for a kernel in this thread; other threads get the kernel itself."""

    def __init__(self, theirs: Any, launch: Callable[..., None]) -> None:
        self._theirs, self._launch, self._here = theirs, launch, threading.get_ident()

    def __getitem__(self, grid: Any) -> Any:
        return self._launch if threading.get_ident() == self._here else self._theirs[grid]


@contextlib.contextmanager
def _with(module: ModuleType, **replaced: Any) -> Iterator[None]:
    names = vars(module)
    before = {name: names[name] for name in replaced}
    try:
        names.update(replaced)
        yield
    finally:
        names.update(before)


def _part(
    target: Any, probe: Any, seams: Mapping[str, Callable[..., Any]], observe: Callable[[ModuleType], Observation]
) -> Overlay:
    return Overlay(
        id="mamba2-int32-offsets",
        pack=29,
        title="keep tensors that Mamba-2's kernels index below 2**31 elements, or raise an error",
        target=target,
        probe=probe,
        replacements={feature.NARROW: tuple(Replacement(symbol=name, make=make) for name, make in seams.items())},
        unsupported={},
        witness=observe,
        self_test=observe,
        opt_in=False,
        symptoms=(
            "NaN or garbage from Mamba-2 with long sequences or large batches",
            "illegal memory access in Mamba-2",
            "CUDA error with more than 60 thousand tokens",
        ),
        concerns="mamba",
        breaks="Mamba-2 is wrong without an error, or ends with an illegal access, where a tensor reaches over 2**31 elements",
        brief="Mamba-2 tensors over 2**31 elements",
        until="its kernels have offsets of 64 bits",
        retire_when="mamba-ssm's kernels compute offsets with 64 bits",
        threads=(
            Thread(repository="state-spaces/mamba", number=1015, state="open, opened 2026-08-12, seen 2026-11-23"),
            Thread(repository="state-spaces/mamba", number=1038, state="open, opened 2026-09-03, seen 2026-11-23"),
            Thread(repository="state-spaces/mamba", number=1016, state="closed, opened 2026-08-12: not merged"),
            Thread(repository="state-spaces/mamba", number=686, state="open, opened 2025-02-05, seen 2026-11-23"),
        ),
        last_validated="2026-11-23, x86-64 without GPU, torch 2.11.0, triton 3.6.0 interpreted: mamba-ssm 2.2.6.post3 and 2.3.2.post1, main e9594ce; "
        "2.0.1 to 2.3.2.post1 read. H200: 2.3.2.post1, 131072 tokens against two halves",
    )


PARTS = (
    _part(
        feature.SCAN,
        feature.probe_scan,
        {feature.FORWARD: _make_forward, feature.BACKWARD: _make_backward},
        observe_scan,
    ),
    _part(
        feature.NORM,
        feature.probe_norm,
        {feature.NORM_FORWARD: _make_norm_forward, feature.NORM_BACKWARD: _make_norm_backward},
        observe_norm,
    ),
)
