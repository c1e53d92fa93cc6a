"""CUDA graph capture of a gated delta net with packed sequences, for the lengths of its warm-up.

Outside a capture every check is upstream's own. A passed check is recorded in a weak mapping by tensor object: a copy of the content
on its device, and the parameters of the check. While the current stream is captured only a recorded tensor is accepted, and only
if it passed both for queries and for keys, so that the two are one tensor: `torch.equal` returns for the same memory
without a comparison (torch 2.1 and newer). An assertion that runs with every replay then compares the content with the copy.

This is narrower than the checks, on purpose. The kernels of flash-linear-attention look up the chunks of `cu_seqlens`
on the host, and cache the table by identity of the tensor; a graph replays the chunks of the warm-up. With other lengths
in the same tensor it would silently compute wrong results. Where the assertion fails, the next synchronisation
reports a device-side assertion and the process is lost.

The graph reads the memory of the copy, so the copy is never replaced. A tensor is compared with its copy
each time that it passes outside a capture, where upstream waits for the device anyway: PyTorch does not count every write. If
it holds other lengths it is refused in every later capture, even if they passed: the kernels would still use the table
of the first ones. The assertion of an existing graph demands the first lengths.

So this is for a graph over static buffers and one packing, such as a whole step over sequences of fixed lengths.
Megatron's own graphs for each layer are refused with a reason: the local ones clone their inputs, and those of
Transformer Engine take no packed sequences, or, on dev, one tensor for queries and another for keys. Support for any packing in one
graph needs tables that are made on the device, the subject of Megatron-LM#6796.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from megacpp_overlays.feature_probes import gdn_capture_gates as feature
from megacpp_overlays.model import Finding, Observation, Overlay, Replacement, Target, Thread
from megacpp_overlays.runtime import dynamo, graph_capture
from megacpp_overlays.runtime.tensor_notes import TensorNotes
from megacpp_overlays.source.trees import SourceTree


class _PassedChecks(NamedTuple):
    """Checks that a `cu_seqlens` tensor passed."""

    content: Any
    """Copy of the tensor at its first passed check."""
    passed: frozenset[tuple[str, int, int]]
    """Role, tokens and context parallel ranks of each check."""
    rewritten: bool
    """Whether its content differed from the copy at a later check."""


_checked: TensorNotes[_PassedChecks] = TensorNotes()
_ROLES = ("cu_seqlens_q", "cu_seqlens_kv")


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    import torch

    def resolve(
        self: Any, cu_seqlens_padded: Any, cu_seqlens_actual: Any, total_seq_len: int, name: str, cp_size: int = 1
    ) -> Any:
        chosen = cu_seqlens_actual if cu_seqlens_padded is None else cu_seqlens_padded
        if chosen is None or not graph_capture.capturing(chosen.device):
            found = original(self, cu_seqlens_padded, cu_seqlens_actual, total_seq_len, name, cp_size=cp_size)
            if not torch.compiler.is_compiling():
                _remember(found, (name, total_seq_len, cp_size))
            return found
        checked = _checked.get(chosen)
        if checked is None or any((role, total_seq_len, cp_size) not in checked.passed for role in _ROLES):
            raise RuntimeError(
                f"GDN: {name} cannot be checked while a CUDA graph is captured, and this tensor did not pass before as "
                f"cu_seqlens_q and as cu_seqlens_kv for {total_seq_len} tokens and cp_size={cp_size}; run a warm-up "
                "pass first, with one tensor for both, and capture with that very tensor"
            )
        if checked.rewritten or chosen.shape != checked.content.shape:
            raise RuntimeError(
                f"GDN: {name} was rewritten with other lengths after it had passed, and kernels keep the chunks of the "
                "first ones with the tensor; run the warm-up pass and the capture with a new tensor"
            )
        same = (chosen == checked.content).all()
        torch._assert_async(same, f"GDN: {name} holds other lengths than in the warm-up")  # noqa: SLF001
        return chosen

    for each in (_remember, TensorNotes.get, TensorNotes.set):  # Dynamo does not trace into PyTorch's weak mapping
        dynamo.only_inlined(each)
    return dynamo.only_inlined(resolve)


def _remember(cu_seqlens: Any, passed: tuple[str, int, int]) -> None:
    """Record a passed check of a tensor, its content at the first check, and whether the content has differed since."""
    import torch

    before = _checked.get(cu_seqlens)
    if before is None:
        _checked.set(cu_seqlens, _PassedChecks(cu_seqlens.detach().clone(), frozenset({passed}), rewritten=False))
        return
    rewritten = before.rewritten or not torch.equal(before.content, cu_seqlens)
    _checked.set(cu_seqlens, _PassedChecks(before.content, before.passed | {passed}, rewritten))


def _resolver(module: ModuleType, symbol: str) -> Callable[..., Any]:
    class_name, method = symbol.split(".")
    function = getattr(getattr(module, class_name), method)
    return lambda lengths, total, name: function(None, None, lengths, total, name, cp_size=2)


def _checks(module: ModuleType, symbol: str) -> str | None:
    """Return the first error of upstream's checks outside a capture, on the CPU, or None."""
    import torch

    resolve = _resolver(module, symbol)
    good = torch.tensor([0, 2, 6], dtype=torch.int32, device="cpu")
    if resolve(good, 6, "cu_seqlens_q") is not good:
        return "another tensor is returned"
    for lengths, total in ((good, 8), (torch.tensor([0, 3, 6], dtype=torch.int32, device="cpu"), 6)):
        try:
            resolve(lengths, total, "cu_seqlens_q")
        except ValueError:
            continue
        return f"{lengths.tolist()} passes for {total} tokens on 2 ranks"
    return None


def _witness(symbol: str) -> Callable[[ModuleType], Observation]:
    def witness(module: ModuleType) -> Observation:
        with graph_capture.host_reads() as read:
            wrong = _checks(module, symbol)
        if wrong is not None:
            return Observation(broken=False, seen=f"unknown behaviour: {wrong}")
        return Observation(broken=bool(read), seen=f"{len(read)} reads from the host in three calls")

    return witness


def _self_test(symbol: str) -> Callable[[ModuleType], Observation]:
    def self_test(module: ModuleType) -> Observation:
        """Check outside a capture, then rehearse captures with the tensor that passed and with other tensors."""
        import torch

        if (wrong := _checks(module, symbol)) is not None:
            return Observation(broken=True, seen=wrong)
        resolve = _resolver(module, symbol)
        lengths, key_lengths = torch.tensor([[0, 2, 6], [0, 2, 6]], dtype=torch.int32, device="cpu").unbind()
        for role in _ROLES:
            resolve(lengths, 6, role)
        resolve(key_lengths, 6, _ROLES[1])
        with graph_capture.rehearsal(), graph_capture.host_reads() as read:
            kept = resolve(lengths, 6, _ROLES[0]) is lengths is resolve(lengths, 6, _ROLES[1])
            refused = all(_refuses(resolve, *case) for case in ((key_lengths, 6), (lengths.clone(), 6), (lengths, 8)))
            lengths[1] = 4
            changed = _refuses(resolve, lengths, 6)
        for role in _ROLES:
            resolve(lengths, 6, role)
        lengths[1] = 2
        with graph_capture.rehearsal():
            changed = changed and _refuses(resolve, lengths, 6)
        seen = f"warmed-up lengths kept: {kept}; others refused: {refused and changed}; {len(read)} reads from the host"
        return Observation(broken=bool(read) or not (kept and refused and changed), seen=seen)

    return self_test


def _refuses(resolve: Callable[..., Any], lengths: Any, total: int) -> bool:
    try:
        resolve(lengths, total, _ROLES[0])
    except RuntimeError:
        return True
    return False


def _part(target: Target, probe: Callable[[SourceTree], Finding]) -> Overlay:
    return Overlay(
        id="gdn-capture-gates",
        pack=1,
        title="hold a gated delta net's packed lengths to those of the warm-up while a CUDA graph is captured",
        target=target,
        probe=probe,
        replacements={feature.READ_LENGTHS: (Replacement(symbol=target.symbol, make=_make),)},
        unsupported={},
        witness=_witness(target.symbol),
        self_test=_self_test(target.symbol),
        opt_in=False,
        symptoms=(
            "CUDA graph capture of a gated delta net with packed sequences fails",
            "operation not permitted when stream is capturing, in cu_seqlens",
        ),
        concerns="gated_delta",
        breaks="capturing a gated delta net with packed sequences into a CUDA graph raises",
        brief="packed delta nets under CUDA graphs",
        until="Megatron reads no lengths from the host",
        retire_when="no supported Megatron reads packed lengths of the gated delta net from the host",
        threads=(
            Thread(repository="NVIDIA/Megatron-LM", number=2645, state="merged 2026-05-14, with the checks"),
            Thread(repository="NVIDIA/Megatron-LM", number=6796, state="open 2026-08-24, for dev"),
            Thread(repository="fla-org/flash-linear-attention", number=1155, state="open when last seen"),
        ),
        last_validated="2026-11-21, H200, torch 2.11.0+cu130: graphs of megatron-core 0.19.2 up to the layer's first projection; "
        "0.18.2 read",
    )


PARTS = (_part(feature.SINGLE, feature.probe_single), _part(feature.COMMON, feature.probe_common))
