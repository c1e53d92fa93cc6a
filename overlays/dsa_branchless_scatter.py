"""Scatter top-k indices into the DSA index mask without a read from the device.

Valid positions become 0.0, and all other elements keep their bits, for any content of the mask. Sentinels, negative
indices, go to an extra first column of a boolean scratch mask and touch no element of the index mask. Other repairs
differ: clamp, scatter and fix-up, as in the note of the pack, overwrites a 0.0 in column 0 with -inf; upstream's maximum
with 0.0 keeps a positive number or a NaN. Callers in Megatron start from -inf, where all of these agree.

The scratch mask has one byte for each of [b, chunk, skv + 1]. An index that is too large raises as before: on the GPU
by a device-side assertion; on the CPU with a message that counts the extra column, too.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from megacpp_overlays.feature_probes import dsa_branchless_scatter as feature
from megacpp_overlays.model import Finding, Observation, Overlay, Replacement, Target, Thread
from megacpp_overlays.runtime import graph_capture
from megacpp_overlays.source.trees import SourceTree


def _make(_original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    import torch

    def scatter(index_mask: Any, topk_indices: Any, *, seq_chunk_size: int = 256) -> None:
        batch, queries, keys = index_mask.shape
        if topk_indices.ndim != 3 or topk_indices.shape[:2] != (batch, queries):
            raise AssertionError(f"topk_indices must be [{batch}, {queries}, topk], not {tuple(topk_indices.shape)}")
        step = max(1, int(seq_chunk_size))
        for start in range(0, queries, step):
            rows = index_mask[:, start : start + step]
            indices = topk_indices[:, start : start + step].to(dtype=torch.int64, device=index_mask.device)
            # An extra first column takes negative indices; an index past the last key is still out of range.
            hit = torch.zeros((batch, rows.size(1), keys + 1), dtype=torch.bool, device=index_mask.device)
            hit.scatter_(-1, indices.clamp(min=-1) + 1, True)
            rows.masked_fill_(hit[..., 1:], 0.0)

    return scatter


def _measure(module: ModuleType, symbol: str) -> tuple[list[str], str | None]:
    """Return the host reads of the loaded function, and its first wrong result, in words.

    The mask [2, 3, 4] has every kind of content; indices must set 0.0, and nothing else may change.
    """
    import torch

    inf, nan = float("inf"), float("nan")
    content = [[[-inf, 0.0, 2.5, -1.0], [nan, inf, -inf, -inf], [0.0, -inf, -inf, 3.0]]] * 2
    cases = {
        "no sentinel": [[[0], [3], [1]], [[2], [2], [0]]],
        "sentinels": [[[1, -1, 1], [-1, -1, -1], [3, 0, -7]], [[-1, 2, -1], [0, 0, 0], [-1, -1, -1]]],
    }
    read: list[str] = []
    for name, indices in cases.items():
        for dtype, step in ((torch.int64, 256), (torch.int32, 1), (torch.int32, 2)):
            # Every second row of a larger tensor: the function must also write to a mask that is not contiguous.
            mask = torch.tensor(content, dtype=torch.float32, device="cpu").repeat_interleave(2, dim=1)[:, ::2]
            wanted = mask.clone()
            for b, rows in enumerate(indices):
                for q, row in enumerate(rows):
                    for k in row:
                        if k >= 0:
                            wanted[b, q, k] = 0.0
            given = torch.tensor(indices, dtype=dtype, device="cpu")
            with graph_capture.host_reads() as seen:
                getattr(module, symbol)(mask, given, seq_chunk_size=step)
            read += seen
            if mask.contiguous().view(torch.int32).tolist() != wanted.contiguous().view(torch.int32).tolist():
                return read, f"{name}, {dtype}, {step} rows at a time: {mask.tolist()} instead of {wanted.tolist()}"
    return read, None


def _witness(symbol: str) -> Callable[[ModuleType], Observation]:
    def witness(module: ModuleType) -> Observation:
        read, wrong = _measure(module, symbol)
        if wrong is not None:
            return Observation(broken=False, seen=f"its result differs from that of the replacement: {wrong}")
        return Observation(broken=bool(read), seen=f"{len(read)} reads from the host in six calls")

    return witness


def _self_test(symbol: str) -> Callable[[ModuleType], Observation]:
    def self_test(module: ModuleType) -> Observation:
        read, wrong = _measure(module, symbol)
        return Observation(broken=bool(read or wrong), seen=wrong or f"{len(read)} reads from the host in six calls")

    return self_test


def _part(target: Target, probe: Callable[[SourceTree], Finding]) -> Overlay:
    return Overlay(
        id="dsa-branchless-scatter",
        pack=1,
        title="scatter DSA's top-k indices into its index mask without a branch on sentinels",
        target=target,
        probe=probe,
        replacements={feature.BRANCHY: (Replacement(symbol=target.symbol, make=_make),)},
        unsupported={},
        witness=_witness(target.symbol),
        self_test=_self_test(target.symbol),
        opt_in=False,
        symptoms=(
            "CUDA graph capture of sparse attention fails",
            "operation not permitted when stream is capturing, in DSA's index mask",
        ),
        concerns="dsa",
        breaks="capturing DSA's unfused attention or its indexer loss into a CUDA graph raises",
        brief="DSA's mask scatter under CUDA graphs",
        until="Megatron scatters without a readback",
        retire_when="every supported Megatron scatters without reading back, as main does since d1cab16a01",
        threads=(
            Thread(repository="NVIDIA/Megatron-LM", number=3674, state="closed 2026-06-17, superseded by 5243 to 5247"),
            Thread(repository="NVIDIA/Megatron-LM", number=5246, state="merged 2026-06-25, with the branch"),
            Thread(repository="NVIDIA/Megatron-LM", number=5099, state="merged 2026-07-08, the repair on main"),
            Thread(repository="NVIDIA/Megatron-LM", number=6020, state="merged 2026-07-28, the repair on dev"),
        ),
        last_validated="2026-11-21, H200, torch 2.11.0+cu130: graphs of PR 3674 head c769569327 and of stand-ins; x86-64 without "
        "GPU: main da482cf5c8 loaded",
    )


PARTS = (_part(feature.DSA, feature.probe_dsa), _part(feature.MASKING, feature.probe_masking))
