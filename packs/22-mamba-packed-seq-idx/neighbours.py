"""Rows that Megatron's MambaMixer scans rightly without the overlay: not packed, of one document, and packed where the caller says how
many tokens there are or to which document each of them belongs."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, TargetAbsent, beside

PACK = beside(__file__)
TOKENS = sum(PACK.PADDED) + PACK.TAIL
BOUNDS = tuple(sum(PACK.PADDED[:number]) for number in range(len(PACK.PADDED) + 1))


def _not_packed() -> Mapping[str, object]:
    """Run two rows that are no packed ones, and those of somebody who says so in parameters."""
    return {
        **_run(None, rows=2),
        **_named("parameters of rows", _run({"qkv_format": "sbhd", "cu_seqlens_q": BOUNDS}, rows=2)),
    }


def _one_document() -> Mapping[str, object]:
    return _run({"cu_seqlens_q": (0, TOKENS)})


def _told_tokens() -> Mapping[str, object]:
    return _run({"cu_seqlens_q": BOUNDS, "cu_seqlens_q_padded": BOUNDS, "total_tokens": TOKENS})


def _told_documents() -> Mapping[str, object]:
    """Run a row whose caller has a document for each token, and other boundaries than that."""
    import torch

    numbers = torch.arange(TOKENS, dtype=torch.int32)[None] // 7
    return _run({"cu_seqlens_q": BOUNDS, "seq_idx": numbers})


def _evaluated() -> Mapping[str, object]:
    import torch

    with torch.no_grad():
        return _run({"cu_seqlens_q": BOUNDS, "total_tokens": TOKENS}, is_trained=False)


def _run(fields: Mapping[str, Any] | None, *, rows: int = 1, is_trained: bool = True) -> Mapping[str, Any]:
    """Return the output of a mixer with a plain scan, the gradients of its row and of what it scans with, and the parameters that it was given."""
    import torch

    with PACK._on("cpu"):
        module: Any = importlib.import_module(PACK.MODULE)
        PACK._params(module, "cpu")  # raises TargetAbsent
        params = None if fields is None else _params(module, fields)
        mixer = PACK._build(module, "cpu", kernels=False).train(is_trained)
        generator = torch.Generator().manual_seed(3)
        row, weights = (torch.randn(TOKENS, rows, PACK.HIDDEN, generator=generator) for _ in range(2))
        found: dict[str, Any] = {}
        if is_trained:
            found["output"], found["gradient of the row"] = PACK._run(mixer, row, weights, params)
            scanned = [name for name, each in mixer.named_parameters() if each.grad is not None]
            found |= {f"gradient of {name}": mixer.get_parameter(name).grad for name in scanned}
        else:
            found["output"], _ = mixer(row, packed_seq_params=params)
        if params is not None:
            given = {each.name: getattr(params, each.name) for each in dataclasses.fields(params)}
            found |= {name: each for name, each in given.items() if isinstance(each, torch.Tensor)}
        return found


def _params(module: Any, fields: Mapping[str, Any]) -> Any:
    import torch

    given = {
        name: torch.tensor(each, dtype=torch.int32) if isinstance(each, tuple) else each
        for name, each in fields.items()
    }
    if strange := given.keys() - {each.name for each in dataclasses.fields(module.PackedSeqParams)}:
        raise TargetAbsent(f"PackedSeqParams has no {', '.join(sorted(strange))}")
    return module.PackedSeqParams(**{"qkv_format": "thd", **given})


def _named(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{what}, {name}": each for what, each in found.items()}


def _neighbour(name: str, run: Callable[[], Mapping[str, object]]) -> Neighbour:
    return Neighbour(name=name, overlay="mamba-packed-seq-idx", run=run)


NEIGHBOURS = (
    _neighbour("not-packed", _not_packed),
    _neighbour("one-document", _one_document),
    _neighbour("tokens-given", _told_tokens),
    _neighbour("documents-given", _told_documents),
    _neighbour("evaluated", _evaluated),
)
