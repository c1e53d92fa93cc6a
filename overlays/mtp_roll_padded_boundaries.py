"""Rolling of documents in a padded packed row within their padded boundaries, in Megatron's multi-token prediction.

Multi-token prediction shifts labels, masks, token and position ids of each document by one. For a packed row `roll_tensor`
takes the boundaries of documents from `cu_seqlens_q`, which counts no padding. But `cu_seqlens_q_padded` has the layout of the row,
and its split over context parallel ranks. From the second document on, labels are then those of neighbours, and
positions within documents are masked, without a warning.

Upstream's function is called with a copy of the parameters whose `cu_seqlens_q` has the padded boundaries. Padding then
belongs to its document: its first token is rolled into the last token of the document, as on dev, and callers mask it.
Without padding the caller's own object is passed on, and results are upstream's, bit for bit. Nothing is read from the
device that upstream does not read.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from megacpp_overlays.feature_probes import mtp_roll_padded_boundaries as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def _roll_tensor_packed_seq(
        tensor: Any, shifts: Any, dims: Any, packed_seq_params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return original(tensor, shifts, dims, _where_documents_lie(packed_seq_params), *args, **kwargs)

    return _roll_tensor_packed_seq


def _where_documents_lie(params: Any) -> Any:
    """Return parameters whose `cu_seqlens_q` counts the padding: the caller's own where they have none, else a copy."""
    import copy

    padded = getattr(params, "cu_seqlens_q_padded", None)
    if padded is None or padded is params.cu_seqlens_q or params.cu_seqlens_q is None:
        return params
    copied = copy.copy(params)  # without the constructor, which would derive fields anew
    copied.cu_seqlens_q = padded
    return copied


_ROW = (1, 2, 3, 4, 5, 6)
_CASES = (
    ({"cu_seqlens_q": (0, 2, 4), "cu_seqlens_q_padded": (0, 3, 6)}, [2, 3, 0, 5, 6, 0]),
    ({"cu_seqlens_q": (0, 2, 6)}, [2, 0, 4, 5, 6, 0]),
)
"""Boundaries of two documents in that row, padded and not, and the expected row."""


def observe(module: ModuleType) -> Observation:
    """Roll a row of two documents on the CPU, once with a token of padding behind each of them and once without."""
    import inspect

    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    def numbers(values: tuple[int, ...]) -> Any:
        return torch.tensor(values, dtype=torch.int32, device="cpu")

    takes_lists = "tensors" in inspect.signature(module.roll_tensor).parameters  # on dev since 2026-08-10, and no sums
    seen, broken = [], False
    for bounds, expected in _CASES:
        params = PackedSeqParams(qkv_format="thd", **{name: numbers(each) for name, each in bounds.items()})
        row = numbers(_ROW)[None]
        if takes_lists:
            [rolled] = module.roll_tensor([row], packed_seq_params=params)
        else:
            rolled, total = module.roll_tensor(row, packed_seq_params=params)
            broken |= int(total) != sum(expected)
        broken |= rolled.tolist() != [expected]
        broken |= params.cu_seqlens_q.tolist() != list(bounds["cu_seqlens_q"])
        seen.append(f"{rolled.tolist()[0]} for {', '.join(f'{name}={value}' for name, value in bounds.items())}")
    return Observation(broken=broken, seen=f"{list(_ROW)} is rolled to {'; '.join(seen)}")


OVERLAY = Overlay(
    id="mtp-roll-padded-boundaries",
    pack=24,
    title="roll labels of multi-token prediction within the documents of a padded packed row",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.UNPADDED: (Replacement(symbol=feature.PACKED, make=_make),)},
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "MTP loss is too high with packed, padded sequences",
        "MTP learns labels of the next document",
    ),
    concerns="mtp and packed",
    breaks="multi-token prediction learns labels of neighbouring documents where documents of a packed row are padded",
    brief="MTP labels of other documents",
    until="roll_tensor takes padded boundaries",
    retire_when="roll_tensor takes the boundaries of a packed row from cu_seqlens_q_padded where it is given",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=6205, state="open, opened 2026-08-03, seen 2026-11-22"),
        Thread(repository="NVIDIA/Megatron-LM", number=4495, state="open, opened 2026-04-28, seen 2026-11-22"),
        Thread(repository="NVIDIA/Megatron-LM", number=4494, state="merged to dev 2026-05-12"),
        Thread(
            repository="NVIDIA/Megatron-LM",
            number=6746,
            state="merged, opened 2026-08-21: the same function's neighbours, in no release",
        ),
    ),
    last_validated="2026-11-22, x86-64 without GPU, torch 2.11.0: megatron-core 0.16.1, 0.17.1, 0.18.2 and 0.19.2 on one rank, two and two "
    "times two gloo ranks; 0.16.0 to 0.19.2, main d98e8a64dd, dev d48bd6be0a and pull request 6746 read. H200, two NCCL ranks: 0.19.2",
)
