"""State reset at document boundaries of packed rows in `MambaMixer`, also without `total_tokens` from the caller.

Convolution and scan reset their state where `seq_idx` changes. Since 0.17.0 the mixer takes it from `PackedSeqParams`,
which has none unless its caller passes the number of tokens. Without it, state silently runs from one document into the
next. This overlay derives a missing `seq_idx` from `cu_seqlens_q_padded`, else `cu_seqlens_q`, and the
length that the mixer has gathered from sequence and context parallel ranks, as 0.16 did. The numbers are those
that upstream computes from `total_tokens`, padding behind the last document included.

The caller's object is not changed: upstream's method gets a copy of the parameters, so that no other code, such as a CUDA graph
of a later layer, finds a field set that was None. With `seq_idx` or `total_tokens` given, with `qkv_format` "sbhd" or
"bshd", and without boundaries, upstream's method gets the caller's own object.

The host never waits, and no result is cached: each layer derives the numbers from the boundaries when it runs. PyTorch counts
writes to a tensor, but not those of a collective that receives into it, of `.data`, or of a NumPy or DLPack alias, so a cached result
could be stale. A CUDA graph derives them from the tensor's values at each replay.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import mamba_packed_seq_idx as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread

_ROWS_OF_ONE_SAMPLE = frozenset({"sbhd", "bshd"})


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def _ssm_training(self: Any, zxBCdt: Any, packed_seq_params: Any = None, **more: Any) -> Any:  # noqa: N803 - upstream's name
        return original(self, zxBCdt, _with_seq_idx(packed_seq_params, zxBCdt), **more)

    return _ssm_training


def _with_seq_idx(params: Any, activations: Any) -> Any:
    """Return the parameters with `seq_idx`: the caller's own where there is nothing to add, else a copy.

    Args:
        params: a `PackedSeqParams`, or None.
        activations: [tokens, batch, channels], gathered.
    """
    import torch

    if params is None or params.seq_idx is not None or params.qkv_format in _ROWS_OF_ONE_SAMPLE:
        return params
    boundaries = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    if not isinstance(boundaries, torch.Tensor):
        return params
    copied = _copy_of(params)
    copied.seq_idx = _seq_idx(boundaries, activations.shape[0], activations.device)
    return copied


def _copy_of(params: Any) -> Any:
    """Return a shallow copy made without the constructor, which would derive fields anew."""
    import copy
    import dataclasses

    import torch

    if not torch.compiler.is_compiling():
        return copy.copy(params)
    copied = object.__new__(type(params))  # torch.compile can trace this, and not copy.copy (torch 2.11)
    for each in dataclasses.fields(params):
        setattr(copied, each.name, getattr(params, each.name))
    return copied


def _seq_idx(boundaries: Any, tokens: int, device: Any) -> Any:
    """Return the number of each token's document, int32 [1, tokens].

    Args:
        boundaries: starts and ends of documents, [documents + 1], in non-decreasing order.
        tokens: the length of the row; tokens behind the last boundary are a document of their own.
        device: the device of the row.
    """
    import torch

    ends = boundaries.detach()[1:].to(device).contiguous()
    positions = torch.arange(tokens, dtype=ends.dtype, device=device)
    return torch.searchsorted(ends, positions, right=True, out_int32=True).unsqueeze(0)


_ROW = 6
_CASES = (
    ({"cu_seqlens_q": (0, 2, 5)}, (0, 0, 1, 1, 1, 2)),
    ({"cu_seqlens_q": (0, 2, 4), "cu_seqlens_q_padded": (0, 3, 6)}, (0, 0, 0, 1, 1, 1)),
    ({"cu_seqlens_q": (0, 2, 5), "total_tokens": _ROW}, (0, 0, 1, 1, 1, 2)),
)
"""Boundaries of a row of six tokens, and the document of each token."""


def observe(module: ModuleType) -> Observation:
    """Observe the `seq_idx` that the scan gets for packed rows, with a stub of the scan, on the CPU and in this thread."""
    import dataclasses

    import torch

    seen, broken = [], False
    known = {each.name for each in dataclasses.fields(module.PackedSeqParams)}
    for fields, expected in _CASES:
        if not known.issuperset(fields):  # until 0.16.1 there is no field for the number of tokens
            continue
        given = {
            name: torch.tensor(value, dtype=torch.int32, device="cpu") if isinstance(value, tuple) else value
            for name, value in fields.items()
        }
        params = module.PackedSeqParams(qkv_format="thd", **given)
        before = {name: id(value) for name, value in vars(params).items()}
        found = _scanned_with(module, params)
        numbers = None if found is None else found.tolist()
        broken |= numbers != [list(expected)] or {name: id(value) for name, value in vars(params).items()} != before
        seen.append(f"{numbers and numbers[0]} for {', '.join(f'{name}={value}' for name, value in fields.items())}")
    return Observation(broken=broken, seen=f"the scan of {_ROW} packed tokens gets seq_idx {'; '.join(seen)}")


def _scanned_with(module: ModuleType, params: Any) -> Any:
    """Return the `seq_idx` that the scan of a loaded mixer gets."""
    import torch

    one = torch.ones(1, device="cpu")
    parallel = SimpleNamespace(
        get_A_log=lambda: one,
        get_conv1d_weight=lambda: one,
        get_conv1d_bias=lambda: one,
        get_dt_bias=lambda: one,
        get_D=lambda: one,
        ngroups_local_tpcp=1,
        post_conv_ssm=lambda values, _params: values,
    )
    mixer = object.__new__(module.MambaMixer)  # its constructor asks for kernels, and runs none of them
    vars(mixer).update(
        cp=parallel,
        conv1d=SimpleNamespace(bias=None),
        D_has_hdim=False,
        chunk_size=_ROW,
        activation="silu",
        headdim=1,
        norm_before_gate=False,
        rmsnorm=False,
        mamba_training_ssm_states_dtype=None,
    )
    with _before_the_scan(module) as scanned:
        mixer._ssm_training(torch.zeros(_ROW, 1, 1, device="cpu"), params)
    return scanned[-1]


@contextlib.contextmanager
def _before_the_scan(module: ModuleType) -> Iterator[list[Any]]:
    """Replace the scan in this thread, and collect the `seq_idx` of each call; other threads get the real scan."""
    names = vars(module)
    here = threading.get_ident()
    collected: list[Any] = []

    def scan(values: Any, *_: Any, seq_idx: Any = None, **__: Any) -> Any:
        collected.append(seq_idx)
        return values

    ours: dict[str, Callable[..., Any]] = {
        "mamba_split_conv1d_scan_combined": scan,
        "_check_mamba_sequence_packing_support": lambda **_: (True, None),
        # einops may not be installed, and other rearranged tensors do not matter here.
        "rearrange": lambda values, pattern, **_: values.transpose(0, 1) if values.dim() == 3 else values,
    }
    theirs = {name: names.get(name, _MISSING) for name in ours}

    def chosen(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return (ours[name] if threading.get_ident() == here else theirs[name])(*args, **kwargs)

        return call

    names.update({name: chosen(name) for name in ours})
    try:
        yield collected
    finally:
        for name, value in theirs.items():
            if value is _MISSING:
                del names[name]
            else:
                names[name] = value


_MISSING: Any = object()

OVERLAY = Overlay(
    id="mamba-packed-seq-idx",
    pack=22,
    title="begin each document of a packed row anew in Megatron's Mamba mixer",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.FROM_CALLER: (Replacement(symbol=feature.METHOD, make=_make),)},
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "state leaks from one packed document into the next",
        "loss with packed sequences is worse than without, in Mamba or hybrid models",
        "packed and unpacked runs of Mamba differ",
    ),
    concerns="mamba_mixer and packed",
    breaks="conv and SSM state run from one packed document into the next unless the caller gives total_tokens",
    brief="state that leaks between packed documents",
    until="MambaMixer derives seq_idx",
    retire_when="MambaMixer derives seq_idx from cu_seqlens, or PackedSeqParams does without total_tokens",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=3373, state="in 0.17.0: seq_idx from total_tokens"),
        Thread(repository="NVIDIA/Megatron-LM", number=4103, state="in 0.18.0: its review asks for total_tokens"),
        Thread(
            repository="NVIDIA/Megatron-LM", number=3869, state="open, opened 2026-03-14: packed rows in CUDA graphs"
        ),
        Thread(repository="NVIDIA-NeMo/Megatron-Bridge", number=3474, state="closed, opened 2026-04-22"),
        Thread(
            repository="NVIDIA-NeMo/Megatron-Bridge", number=3484, state="merged, opened 2026-04-22: its caller tells"
        ),
        Thread(repository="NovaSky-AI/SkyRL", number=2056, state="merged, opened 2026-08-19: its caller tells"),
    ),
    last_validated="2026-11-22, x86-64 without GPU, torch 2.11.0, triton 3.6.0: megatron-core 0.17.1, 0.18.2 and 0.19.2 with the kernels "
    "of mamba-ssm 2.3.2.post1 interpreted, two context parallel ranks on 0.19.2; main d98e8a64dd and dev d48bd6be0a with a plain "
    "scan; 0.16.1 right without it; 0.8.0 to 0.19.2 read",
)
