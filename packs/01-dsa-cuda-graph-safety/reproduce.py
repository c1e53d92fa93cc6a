"""DSA and the gated delta net under CUDA-graph capture: does a forward pass wait for the device where it may not?

On the GPU each case warms a function of upstream up, captures it with `torch.cuda.graph`, changes its inputs in place
and compares every replay with a run outside the graph. A capture that raises is the defect. On the CPU the scatter
alone can be asked: a meta tensor has no value to read.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

_VARIANT = "megatron.core.transformer.experimental_attention_variant"
_DSA, _LAYOUT, _MASKING = (f"{_VARIANT}.{name}" for name in ("dsa", "dsa_layout", "dsa_masking"))
_GDN = "megatron.core.ssm.gated_delta_net"
_LENGTHS = "_validate_nonpacked_cp_uniform_length"


def _module(name: str) -> Any:
    """Return a module of upstream, or None where this tree does not have it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise Blocked(f"{name} cannot be imported without {error.name}") from error
        return None


def _function(*places: tuple[str, str]) -> Callable[..., Any]:
    """Return the first of some functions that this tree has."""
    for module, name in places:
        if (found := getattr(_module(module), name, None)) is not None:
            return found  # type: ignore[no-any-return]
    raise TargetAbsent(f"there is no {' and no '.join(name for _, name in places)}")


def _scatter() -> Callable[..., None]:
    return _function((_MASKING, "scatter_topk_into_index_mask"), (_DSA, "_scatter_topk_into_index_mask"))


# Scatter


def _scatter_cpu() -> Behaviour:
    """Scatter 600 rows of 16 indices with sentinels into 96 keys, then the same shapes without values."""
    import torch

    scatter = _scatter()
    indices = torch.randint(-1, 96, (2, 300, 16), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    indices[:, ::7] = -1
    mask = torch.full((2, 300, 96), float("-inf"))
    scatter(mask, indices)
    expected = torch.zeros(2, 300, 97, dtype=torch.bool).scatter_(-1, indices.long() % 97, True)[..., :96]
    right = bool(((mask == 0) == expected).all()) and bool(mask[~expected].isneginf().all())
    values = f"{int(expected.sum())} of {expected.numel()} places written, {'all right' if right else 'NOT as asked'}"
    try:
        scatter(mask.to("meta"), indices.to("meta"))
    except RuntimeError as error:
        return Behaviour(broken=True, seen=f"{values}; without values: {_first_line(error)}")
    return Behaviour(broken=not right, seen=f"{values}; nothing is read from meta tensors")


def _scatter_captured() -> Behaviour:
    import torch

    scatter = _scatter()
    indices, changes = _changing_indices(topk=64, keys=2048)

    def work() -> Sequence[Any]:
        mask = torch.full((2, 600, 2048), float("-inf"), device="cuda")
        scatter(mask, indices)
        return (mask,)

    return _under_capture(work, changes)


def _attention_captured() -> Behaviour:
    """Run absorbed attention over selected keys, the function that scatters on the way of a forward pass."""
    import torch

    _scatter()
    attention = _function((_DSA, "_unfused_absorbed_dsa_fn"))
    indices, changes = _changing_indices(topk=64, keys=600)
    generator = torch.Generator(device="cuda").manual_seed(2)
    query = torch.randn(600, 2, 4, 96, device="cuda", generator=generator)
    key = torch.randn(600, 2, 1, 96, device="cuda", generator=generator)
    return _under_capture(lambda: (attention(query, key, indices, 0.1, 64),), changes, tolerance=1e-5)


def _changing_indices(*, topk: int, keys: int) -> tuple[Any, list[Callable[[], Any]]]:
    """Return indices [2, 600, topk] and what changes them in place: other sentinels, none, mostly them, only them."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(1)
    indices = torch.zeros(2, 600, topk, dtype=torch.int32, device="cuda")

    def fill(lowest: int) -> None:
        indices.random_(lowest, keys, generator=generator)

    fill(-1)
    return indices, [lambda: fill(-1), lambda: fill(0), lambda: fill(-keys), lambda: indices.fill_(-1)]


# Validations


def _positions_captured() -> Behaviour:
    if _module(_LAYOUT) is None:
        raise TargetAbsent(f"there is no {_LAYOUT}")
    return _positions(_function((_LAYOUT, "extract_query_positions_from_position_ids")))


def _positions(extract: Callable[..., Any]) -> Behaviour:
    """Extract query positions from two rows of position ids that are the same."""
    import torch

    ids = torch.arange(64, device="cuda").repeat(2, 1)
    return _under_capture(lambda: (extract(ids, 64, ids.device) + 0,), [lambda: ids.add_(3), lambda: None])


def _bounds_captured() -> Behaviour:
    module = _module(_MASKING)
    if module is None:
        raise TargetAbsent(f"there is no {_MASKING}")
    return _bounds(module, "build_dsattention_forward_mask", "build_fused_indexer_varlen_bounds")


def _bounds(module: Any, mask_name: str, bounds_name: str) -> Behaviour:
    """Build the mask of a causal layer and ask for which keys a fused indexer may look."""
    import torch

    build, bounds = getattr(module, mask_name), getattr(module, bounds_name)
    device = torch.device("cuda", torch.cuda.current_device())

    def work() -> Sequence[Any]:
        mask, varlen, *_ = build(
            sq=64,
            skv=64,
            b=2,
            device=device,
            cp_size=1,
            cp_rank=0,
            cp_comm_type="allgather",
            cp_group=None,
            attn_mask_type=module.AttnMaskType.causal,
            attention_mask=None,
            position_ids=None,
            packed_seq_params=None,
        )
        starts, ends, keys = varlen or (None, None, None)
        found = bounds(
            sq=64, skv=64, device=device, mask=mask, varlen_starts=starts, varlen_ends=ends, key_positions=keys
        )
        return found or ()

    if not work():
        return Behaviour(broken=True, seen="a causal layer declines the fused indexer outside a capture")
    return _under_capture(work, [lambda: None])


def _dsa_captured() -> Behaviour:
    """Ask what this layout validates in `dsa` itself: lengths of ranks, or in a single file positions and bounds."""
    module = _module(_DSA)
    if hasattr(module, _LENGTHS):
        return _lengths(getattr(module, _LENGTHS))
    single = ("_extract_query_positions_from_position_ids", "_build_fused_indexer_varlen_bounds")
    if not hasattr(module, single[0]):
        raise TargetAbsent(f"{_DSA} has neither {_LENGTHS} nor {single[0]}")
    positions = _positions(getattr(module, single[0]))
    if positions.broken or not hasattr(module, single[1]):
        return positions
    return _bounds(module, "_build_dsattention_forward_mask", single[1])


def _lengths(validate: Callable[..., None]) -> Behaviour:
    """Check the lengths of the ranks of a group of one: the same collective and the same reads as with more."""
    import torch

    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_nccl_available()):
        raise Blocked("this torch has no NCCL")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        # Never left: the process ends with the case, and NCCL may wait for a graph that still holds its work.
        distributed.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        counter = torch.zeros(1, device=device)

        def work() -> Sequence[Any]:
            validate(sq=64, skv=64, cp_size=1, cp_group=distributed.group.WORLD, device=device)
            return (counter + 1,)

        return _under_capture(work, [lambda: counter.add_(1), lambda: None])


def _packed_captured() -> Behaviour:
    """Send a packed batch through the forward pass of a gated delta net, as far as its first projection."""
    import torch

    module = _module(f"{_GDN}.gdn") or _module(_GDN)
    layer_class = getattr(module, "GatedDeltaNet", None)
    if layer_class is None or not hasattr(layer_class, "_resolve_cu_seqlens"):
        raise TargetAbsent("the gated delta net takes no packed sequences")
    from megatron.core.packed_seq_params import PackedSeqParams

    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    layer = object.__new__(layer_class)
    config = SimpleNamespace(
        deterministic_mode=False, sequence_parallel=False, linear_cp_mode=None, cp_partition_mode="zigzag"
    )
    vars(layer).update(sp_size=1, cp_size=1, tp_group=group, config=config, in_proj=_arrived, training=False)
    vars(layer).update(pg_collection=SimpleNamespace(cp=group, tp=group), recompute_gdn=False)
    lengths = torch.tensor([0, 24, 64], dtype=torch.int32, device="cuda")
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    hidden = torch.ones(64, 1, 8, device="cuda")

    def work() -> Sequence[Any]:
        try:
            layer_class.forward(layer, hidden, None, packed_seq_params=packed)
        except _ArrivedError:
            return (hidden * 2,)
        raise AssertionError("the forward pass has no input projection")

    return _under_capture(work, [lambda: hidden.add_(1), lambda: None])


class _ArrivedError(Exception):
    """Raised by the projection that stands for the rest of the layer."""


def _arrived(*_: Any, **__: Any) -> None:
    raise _ArrivedError


# Capture


def _under_capture(
    work: Callable[[], Sequence[Any]], changes: Sequence[Callable[[], Any]], *, tolerance: float = 0.0
) -> Behaviour:
    """Capture `work`, and after each change compare a replay with a run outside the graph."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            outputs = work()
    except Exception as error:  # noqa: BLE001 - ending a capture that failed raises once more, over the reason
        first = error.__context__ if isinstance(error.__context__, Exception) else error
        return Behaviour(broken=True, seen=f"the capture raises: {_first_line(first)}")
    worst, differing = 0.0, 0
    for change in changes:
        change()
        graph.replay()
        torch.cuda.synchronize()
        for found, expected in zip(outputs, work(), strict=True):
            if not bool(((found == expected) | (found.isnan() & expected.isnan())).all()):
                worst = max(worst, float((found.float() - expected.float()).nan_to_num().abs().max()))
                differing += 1
    seen = (
        f"captured; {len(changes)} replays on changed inputs, {differing} outputs differ from a run without the graph"
    )
    seen += f", by {worst:.1e} at most" if differing else ""
    return Behaviour(broken=differing > 0 and (tolerance == 0 or worst > tolerance), seen=seen)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"


_VERSIONS = ("megatron-core", "torch", "triton")


def _case(name: str, overlay: str, device: str, run: Callable[[], Behaviour], *targets: str) -> Case:
    return Case(name=name, overlay=overlay, device=device, versions=_VERSIONS, run=run, targets=targets)


CASES = (
    _case("scatter-on-meta", "dsa-branchless-scatter", "cpu", _scatter_cpu),
    _case("scatter-under-capture", "dsa-branchless-scatter", "cuda", _scatter_captured),
    _case("attention-under-capture", "dsa-branchless-scatter", "cuda", _attention_captured),
    _case("dsa-under-capture", "dsa-capture-gates", "cuda", _dsa_captured, _DSA),
    _case("positions-under-capture", "dsa-capture-gates", "cuda", _positions_captured, _LAYOUT),
    _case("bounds-under-capture", "dsa-capture-gates", "cuda", _bounds_captured, _MASKING),
    _case("packed-under-capture", "gdn-capture-gates", "cuda", _packed_captured),
)
