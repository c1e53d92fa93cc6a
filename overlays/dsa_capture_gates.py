"""DSA's validations under CUDA graph capture, checked on the device instead of by the host.

Outside a capture every check is upstream's own. While the current stream is captured the host cannot read values:

Masks and key positions decide whether a fused indexer may run, and it may decline. A mask that the builder of
the same forward pass made for a causal layer is contiguous by construction, and its key positions are 0, 1, 2 ...
The builder's result is recorded by identity, and the record is looked up later. An assertion that runs with every replay then
checks the tensor, because PyTorch does not count every write. Without a record, as for an attention mask of the caller, the
fused indexer declines. The fused indexer loss of spring 2026 reads from the host itself, so it declines as well and the loss
takes upstream's dense path.

Position ids and sequence lengths raise when they do not fit, so they stay checked: on the device, by an assertion that
is captured and runs with every replay. Rows with stride 0 need none. Where an assertion fails, the next
synchronisation reports a device-side assertion and the process is lost. The eager warm-up that a capture needs anyway
reports the error first, with upstream's message. Lengths are exchanged by the collective that gathers the keys right after.

Not covered, and still raising under capture: packed sequences over several context-parallel ranks
(`build_packed_allgather_cp_local_positions` counts on the host), ranks of uneven length
(`get_cp_positions_from_layout`), packed sequences in the single file, which counts them on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import dsa_capture_gates as feature
from megacpp_overlays.model import Finding, Observation, Overlay, Replacement, Target, Thread
from megacpp_overlays.runtime import dynamo, graph_capture
from megacpp_overlays.runtime.tensor_notes import TensorNotes
from megacpp_overlays.source.trees import SourceTree

FUSED_LOSS = "_fused_qk_topk_lighting_with_streaming_sparse_kl"
"""Spring 2026 only: fused indexer and loss in one; it returns None to decline."""
SINGLE_FILE = {name: f"_{name}" for name in (feature.POSITIONS, feature.BOUNDS, feature.MASK)}
"""Names in the single file of spring 2026."""

_contiguous: TensorNotes[bool] = TensorNotes()
"""Masks and key positions that a builder made, and so were contiguous when it returned them."""


def _make_positions(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    import torch

    def extract(position_ids: Any, sq: int, device: Any) -> Any:
        rows = 1 if position_ids is None or position_ids.ndim != 2 else position_ids.size(0)
        if rows <= 1 or not graph_capture.capturing(position_ids.device):
            return original(position_ids, sq, device)
        if position_ids.stride(0) != 0:
            same = (position_ids[0] == position_ids[-1]).all()
            torch._assert_async(same, "DSA: position ids differ across the batch")  # noqa: SLF001 - the only one there is
        return original(position_ids[:1], sq, device)

    return dynamo.only_inlined(extract)


def _make_mask(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def build(*, device: Any, attn_mask_type: Any, **others: Any) -> Any:
        mask, varlen = original(device=device, attn_mask_type=attn_mask_type, **others)
        if attn_mask_type is not None and graph_capture.capturing(device):
            made = mask if varlen is None else varlen[-1]
            if made is not None:
                _contiguous.set(made, True)
        return mask, varlen

    return dynamo.only_inlined(build)


def _make_bounds(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    import torch

    def bounds(
        *, sq: int, skv: int, device: Any, mask: Any, varlen_starts: Any, varlen_ends: Any, key_positions: Any
    ) -> Any:
        given = {"varlen_starts": varlen_starts, "varlen_ends": varlen_ends, "key_positions": key_positions}
        made = mask if varlen_starts is None else key_positions
        # In these cases upstream compares nothing, or raises before a comparison.
        harmless = (mask is None) == (varlen_starts is None) or (varlen_starts is not None and varlen_ends is None)
        if harmless or not graph_capture.capturing(device):
            return original(sq=sq, skv=skv, device=device, mask=mask, **given)
        if made is not None and _contiguous.get(made) is None:
            return None
        if varlen_starts is not None:
            if key_positions is not None:
                if key_positions.shape != (skv,):
                    return None
                _assert_still(key_positions == torch.arange(skv, device=key_positions.device), "key positions")
            return varlen_starts.to(dtype=torch.int32, device=device), varlen_ends.to(dtype=torch.int32, device=device)
        if mask.shape != (sq, skv):
            return None
        visible = torch.isfinite(mask)
        ends = visible.sum(dim=-1, dtype=torch.int32)
        _assert_still(visible == (torch.arange(skv, device=mask.device) < ends[:, None]), "a mask")
        return torch.zeros_like(ends), ends

    return dynamo.only_inlined(bounds)


def _make_fused_loss(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def fused(q: Any, *args: Any, **kwargs: Any) -> Any:
        return None if graph_capture.capturing(q.device) else original(q, *args, **kwargs)

    return dynamo.only_inlined(fused)


def _make_lengths(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    import torch

    def validate(sq: int, skv: int, cp_size: int, cp_group: Any, device: Any) -> Any:
        distributed = torch.distributed
        together = cp_group is not None and distributed.is_available() and distributed.is_initialized()
        if not together or not graph_capture.capturing(device) or cp_group.size() != cp_size:
            return original(sq=sq, skv=skv, cp_size=cp_size, cp_group=cp_group, device=device)
        length = torch.full((1,), sq, dtype=torch.int64, device=device)
        lengths = torch.empty(cp_size, dtype=torch.int64, device=device)
        distributed.all_gather_into_tensor(lengths, length, group=cp_group)
        same = (lengths == sq).all()
        torch._assert_async(same, "DSA: sequence lengths differ across context-parallel ranks")  # noqa: SLF001
        # If the lengths are equal, their sum is the value that upstream expects without a group.
        return original(sq=sq, skv=skv, cp_size=cp_size, cp_group=None, device=device)

    return dynamo.only_inlined(validate)


def _assert_still(same: Any, name: str) -> None:
    """Assert on the device that a tensor still holds the values of its builder."""
    import torch

    torch._assert_async(same.all(), f"DSA: {name} was written to after it was built")  # noqa: SLF001


# Witnesses and self-tests: on the CPU, where a rehearsal replaces a capture.


def _positions_case(module: ModuleType, symbol: str) -> Observation:
    """Compare equal and unequal rows, outside and inside a rehearsed capture."""
    import torch

    extract = getattr(module, symbol)
    same = torch.tensor([[4, 5, 6], [4, 5, 6]], dtype=torch.int64, device="cpu")
    with graph_capture.rehearsal(), graph_capture.host_reads() as read:
        found = [extract(same, 3, same.device), extract(same[:1].expand(4, 3), 3, same.device)]
        found += [extract(same[0], 3, same.device)]
        refused = _raises(lambda: extract(torch.stack((same[0], same[0] + 1)), 3, same.device))
    if any(each.tolist() != [4, 5, 6] for each in found) or not refused:
        return Observation(broken=True, seen=f"positions {found}, unequal rows {'refused' if refused else 'accepted'}")
    return Observation(broken=bool(read), seen=f"{len(read)} reads from the host for {len(found)} batches of positions")


def _positions_witness(module: ModuleType) -> Observation:
    """Observe reads from the host, also for positions with `is_cuda` set.

    An upstream that compares only positions off the GPU is repaired.
    """
    import torch

    seen = _positions_case(module, feature.POSITIONS)
    if not seen.broken:
        return seen

    class OnTheGpu(torch.Tensor):  # type: ignore[misc]
        is_cuda = True

    same = torch.tensor([[4, 5, 6], [4, 5, 6]], dtype=torch.int64, device="cpu").as_subclass(OnTheGpu)
    with graph_capture.host_reads() as read:
        getattr(module, feature.POSITIONS)(same, 3, torch.device("cpu"))
    return seen if read else Observation(broken=False, seen="positions on the GPU are not read from the host")


def _raises(call: Callable[[], Any]) -> bool:
    try:
        call()
    except (AssertionError, RuntimeError):
        return True
    return False


def _layouts(module: ModuleType, mask_symbol: str) -> Iterator[tuple[str, dict[str, Any], tuple[list[int], list[int]]]]:
    """Yield causal layouts: name, arguments of the bounds as the builder made them, and the expected bounds."""
    import torch

    build, causal = getattr(module, mask_symbol), module.AttnMaskType.causal
    cpu = torch.device("cpu")
    positions = torch.tensor([2, 3, 4, 5], dtype=torch.int64, device=cpu)
    cu_seqlens = torch.tensor([0, 1, 4], dtype=torch.int32, device=cpu)
    packed = SimpleNamespace(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
    )
    layouts = (
        ("causal", 4, 1, None, None, [0, 0, 0, 0], [1, 2, 3, 4]),
        ("context parallel", 8, 2, positions[None], None, [0, 0, 0, 0], [3, 4, 5, 6]),
        ("packed", 4, 1, None, packed, [0, 1, 1, 1], [1, 2, 3, 4]),
    )
    for name, keys, ranks, position_ids, params, starts, ends in layouts:
        mask, varlen, *_ = build(
            sq=4,
            skv=keys,
            b=1,
            device=cpu,
            cp_size=ranks,
            cp_rank=0,
            cp_comm_type="allgather",
            cp_group=None,
            attn_mask_type=causal,
            attention_mask=None,
            position_ids=position_ids,
            packed_seq_params=params,
        )
        given = dict(zip(("varlen_starts", "varlen_ends", "key_positions"), varlen or (None, None, None), strict=True))
        yield name, {"sq": 4, "skv": keys, "device": cpu, "mask": mask, **given}, (starts, ends)


def _bounds(module: ModuleType, symbol: str, mask_symbol: str) -> tuple[str | None, list[str]]:
    """Return the first causal layout with wrong bounds, and the reads from the host for the bounds.

    Reads of the builder are not counted: the builder of the single file reads for packed sequences.
    """
    read: list[str] = []
    for name, given, expected in _layouts(module, mask_symbol):
        with graph_capture.host_reads() as seen:
            bounds = getattr(module, symbol)(**given)
        read += seen
        if bounds is None or tuple(each.tolist() for each in bounds) != expected or "int32" not in str(bounds[0].dtype):
            return f"{name}: {bounds} instead of {expected}", read
    return None, read


def _bounds_witness(module: ModuleType, symbol: str, mask_symbol: str) -> Observation:
    """Check that upstream's own comparisons accept its builder's tensors, since the recorded mark will replace them."""
    differs, read = _bounds(module, symbol, mask_symbol)
    if differs is not None:
        return Observation(broken=False, seen=f"unknown behaviour: {differs}")
    return Observation(broken=bool(read), seen=f"{len(read)} comparisons on the host for three causal layouts")


def _bounds_self_test(module: ModuleType, symbol: str, mask_symbol: str) -> Observation:
    import torch

    differs, _ = _bounds(module, symbol, mask_symbol)
    with graph_capture.rehearsal():
        differs_inside, read = _bounds(module, symbol, mask_symbol)
        _, given, _ = next(_layouts(module, mask_symbol))
        foreign = getattr(module, symbol)(**{**given, "mask": torch.zeros_like(given["mask"])})
    wrong = differs or differs_inside or (None if foreign is None else "a mask of unknown origin is accepted")
    return Observation(broken=bool(read or wrong), seen=wrong or f"{len(read)} reads from the host in a rehearsal")


def _lengths_case(module: ModuleType) -> Observation:
    """Check the validation of lengths without a group, the part that is left to upstream and needs one process.

    This shows only that the function exists and takes these arguments. That upstream reads the gathered lengths from the host, and
    that the seam does not, needs a group of ranks. The fingerprint in the probe shows the first.
    """
    import torch

    validate = getattr(module, feature.LENGTHS)
    given = {"sq": 4, "cp_size": 2, "cp_group": None, "device": torch.device("cpu")}
    fits = not any(_raises(lambda skv=skv: validate(skv=skv, **given)) for skv in (4, 8))  # type: ignore[misc]
    refuses = _raises(lambda: validate(skv=6, **given))
    return Observation(broken=not (fits and refuses), seen="4 and 8 keys for 4 queries on 2 ranks fit, 6 do not")


def _lengths_witness(module: ModuleType) -> Observation:
    seen = _lengths_case(module)
    return Observation(broken=not seen.broken, seen=seen.seen)


def _dsa_witness(module: ModuleType) -> Observation:
    if hasattr(module, feature.LENGTHS):
        return _lengths_witness(module)
    positions = _positions_case(module, SINGLE_FILE[feature.POSITIONS])
    if not positions.broken or not hasattr(module, SINGLE_FILE[feature.BOUNDS]):
        return positions
    return _bounds_witness(module, SINGLE_FILE[feature.BOUNDS], SINGLE_FILE[feature.MASK])


def _dsa_self_test(module: ModuleType) -> Observation:
    if hasattr(module, feature.LENGTHS):
        return _lengths_case(module)
    positions = _positions_case(module, SINGLE_FILE[feature.POSITIONS])
    if positions.broken or not hasattr(module, SINGLE_FILE[feature.BOUNDS]):
        return positions
    bounds = _bounds_self_test(module, SINGLE_FILE[feature.BOUNDS], SINGLE_FILE[feature.MASK])
    return bounds if bounds.broken else _fused_loss_case(module, bounds)


def _fused_loss_case(module: ModuleType, so_far: Observation) -> Observation:
    """Call the fused loss with its first parameter by name, as a caller may. Upstream's own would raise for missing arguments."""
    import torch

    try:
        with graph_capture.rehearsal():
            declines = getattr(module, FUSED_LOSS)(q=torch.empty(0, device="cpu")) is None
    except TypeError as error:
        return Observation(broken=True, seen=f"{FUSED_LOSS} in a rehearsal: {error}")
    return so_far if declines else Observation(broken=True, seen=f"{FUSED_LOSS} does not decline")


def _part(
    target: Target,
    probe: Callable[[SourceTree], Finding],
    replacements: dict[str, tuple[Replacement, ...]],
    witness: Callable[[ModuleType], Observation],
    self_test: Callable[[ModuleType], Observation],
) -> Overlay:
    return Overlay(
        id="dsa-capture-gates",
        pack=1,
        title="answer DSA's validations on the device or by construction while a CUDA graph is captured",
        target=target,
        probe=probe,
        replacements=replacements,
        unsupported={},
        witness=witness,
        self_test=self_test,
        opt_in=False,
        symptoms=(
            "CUDA graph capture of sparse attention fails",
            "operation not permitted when stream is capturing, where DSA validates masks or lengths",
        ),
        concerns="dsa",
        breaks="capturing a DSA layer into a CUDA graph raises at a validation that waits for the device",
        brief="DSA's validations under CUDA graphs",
        until="Megatron validates DSA on the device",
        retire_when="no supported Megatron reads from the host to validate masks, positions or lengths of DSA",
        threads=(
            Thread(repository="NVIDIA/Megatron-LM", number=3674, state="closed 2026-06-17, superseded by 5243 to 5247"),
            Thread(repository="NVIDIA/Megatron-LM", number=5099, state="merged 2026-07-08; lengths still read"),
            Thread(repository="NVIDIA/Megatron-LM", number=6020, state="merged 2026-07-28 to dev; lengths still read"),
        ),
        last_validated="2026-11-21, H200, torch 2.11.0+cu130: graphs of megatron-core 0.19.2, PR 3674 head c769569327 and "
        "stand-ins; x86-64 without GPU: main da482cf5c8 loaded, lengths over two gloo ranks",
    )


_SINGLE_POSITIONS = Replacement(symbol=SINGLE_FILE[feature.POSITIONS], make=_make_positions)

PARTS = (
    _part(
        feature.DSA_TARGET,
        feature.probe_dsa,
        {
            feature.READ_LENGTHS: (Replacement(symbol=feature.LENGTHS, make=_make_lengths),),
            feature.SINGLE: (_SINGLE_POSITIONS,),
            feature.SINGLE_FUSED: (
                _SINGLE_POSITIONS,
                Replacement(symbol=SINGLE_FILE[feature.MASK], make=_make_mask),
                Replacement(symbol=SINGLE_FILE[feature.BOUNDS], make=_make_bounds),
                Replacement(symbol=FUSED_LOSS, make=_make_fused_loss),
            ),
        },
        _dsa_witness,
        _dsa_self_test,
    ),
    _part(
        feature.LAYOUT_TARGET,
        feature.probe_layout,
        {feature.EQUAL_POSITIONS: (Replacement(symbol=feature.POSITIONS, make=_make_positions),)},
        _positions_witness,
        lambda module: _positions_case(module, feature.POSITIONS),
    ),
    _part(
        feature.MASKING_TARGET,
        feature.probe_masking,
        {
            feature.EQUAL_BOUNDS: (
                Replacement(symbol=feature.MASK, make=_make_mask),
                Replacement(symbol=feature.BOUNDS, make=_make_bounds),
            )
        },
        lambda module: _bounds_witness(module, feature.BOUNDS, feature.MASK),
        lambda module: _bounds_self_test(module, feature.BOUNDS, feature.MASK),
    ),
)
