"""Labels of Megatron's multi-token prediction on a padded packed row: are they those of each token's own document?

The real `roll_tensor` rolls labels and the mask of three documents, all of them padded, as multi-token prediction does. On one
rank also the gradients of activations are compared; two ranks, which are forked and meet with gloo, hold of each document
one chunk from the start and one from the end, as context parallel ranks do. A document is to get what it gets alone.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import multiprocessing
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent

MODULE = "megatron.core.transformer.multi_token_prediction"
LENGTHS, PADDED = (5, 3, 7), (8, 4, 8)
ENDS = tuple(itertools.accumulate(PADDED))
PLACES = tuple(slice(start, end) for start, end in zip((0, *ENDS), ENDS, strict=False))
RANKS = 2


def _one_rank() -> Behaviour:
    import torch

    module = _module()
    labels, mask = _labels(), _mask()
    wrong = _wrong(_roll(module, labels), _roll(module, mask), slice(None))
    generator = torch.Generator().manual_seed(24)
    values, weights = (torch.randn(2, ENDS[-1], generator=generator) for _ in range(2))
    found, true = values.clone().requires_grad_(), values.clone().requires_grad_()
    (_roll(module, found) * weights * _mask()).sum().backward()
    (_true(true) * weights * _mask()).sum().backward()
    slopes = int((found.grad != true.grad).sum())
    return Behaviour(
        broken=any(wrong) or slopes > 0,
        seen=f"{_words(wrong)}, {slopes} of {values.numel()} gradients of activations wrong",
    )


def _two_ranks() -> Behaviour:
    module = _module()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_on_rank, args=(module, rank, folder)) for rank in range(RANKS)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]
    wrong = tuple(map(sum, zip(*found, strict=True)))
    return Behaviour(broken=any(wrong), seen=f"shared by {RANKS} context parallel ranks: {_words(wrong)}")


def _on_rank(module: ModuleType, rank: int, folder: str) -> None:
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    mine = _share(rank)
    group = torch.distributed.group.WORLD
    labels, mask = (_roll(module, each[:, mine], group) for each in (_labels(), _mask()))
    Path(folder, str(rank)).write_text(json.dumps(_wrong(labels, mask, mine)))
    torch.distributed.destroy_process_group()


def _share(rank: int) -> list[int]:
    found: list[int] = []
    for place in PLACES:
        chunk = (place.stop - place.start) // (2 * RANKS)
        for number in (rank, 2 * RANKS - 1 - rank):
            found += range(place.start + number * chunk, place.start + (number + 1) * chunk)
    return found


def _wrong(labels: Any, mask: Any, mine: Any) -> tuple[int, int]:
    """Return how many labels that are trained on and how many elements of the mask are wrong."""
    true, trained = _true(_labels())[:, mine], _true(_mask())[:, mine]
    return int(((labels != true) & (trained > 0)).sum()), int((mask != trained).sum())


def _words(wrong: tuple[int, ...]) -> str:
    trained = int(_true(_mask()).sum())
    return f"{wrong[0]} of {trained} labels and {wrong[1]} of {ENDS[-1]} elements of the mask wrong"


def _labels() -> Any:
    """Return labels of which no two are the same, [1, tokens]."""
    import torch

    return torch.arange(1, ENDS[-1] + 1)[None]


def _mask() -> Any:
    """Return 1 where a label is a token of the same document, [1, tokens]."""
    import torch

    mask = torch.zeros(1, ENDS[-1])
    for place, length in zip(PLACES, LENGTHS, strict=True):
        mask[:, place.start : place.start + length - 1] = 1
    return mask


def _true(row: Any) -> Any:
    """Return each document shifted by one, with a zero at its end."""
    import torch

    return torch.cat(
        [each for place in PLACES for each in (row[..., place][..., 1:], torch.zeros_like(row[..., :1]))], dim=-1
    )


def _module() -> ModuleType:
    """Return the module of multi-token prediction.

    Raises:
        TargetAbsent: it takes no packed rows.
    """
    module = importlib.import_module(MODULE)
    if "packed_seq_params" not in inspect.signature(module.roll_tensor).parameters:
        raise TargetAbsent("roll_tensor takes no packed rows")
    return module


def _roll(module: ModuleType, values: Any, group: Any = None) -> Any:
    """Roll a padded packed row. Since 2026-08-10 the function on dev takes and returns lists."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds, padded = (
        torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32, device="cpu") for each in (LENGTHS, PADDED)
    )
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
    )
    if "tensors" in inspect.signature(module.roll_tensor).parameters:
        return module.roll_tensor([values], cp_group=group, packed_seq_params=params)[0]
    return module.roll_tensor(values, cp_group=group, packed_seq_params=params)[0]


def _case(name: str, run: Any) -> Case:
    return Case(
        name=name,
        overlay="mtp-roll-padded-boundaries",
        device="cpu",
        versions=("torch",),
        run=run,
        targets=(MODULE,),
    )


CASES = (_case("row-cpu", _one_rank), _case("ranks-cpu", _two_ranks))
