"""Run in a fresh interpreter for each of two context parallel ranks: a real MambaMixer on its share of a packed row; JSON.

    TRITON_INTERPRET=1 python tests/support/packed_mixer_rank.py RANK MEET [total_tokens]

Each rank holds the chunks of each document that Transformer Engine gives it: of as many chunks as twice the ranks, one
from the start and one from the end. Where its compiled module is not installed, its table is computed here. The first rank
puts the shares together and compares them with the documents alone.
"""

from __future__ import annotations

import itertools
import json
import sys
from types import SimpleNamespace
from typing import Any

import megacpp_overlays  # noqa: F401 - first, as in a launcher

# isort: split
import packed_mixer
import torch
from packed_mixer import Packing, Pass, alone, apart, make, prepare, scans, weights_of

RANKS = 2
PACKING = Packing((9, 13), padded=(12, 16))
"""Each document takes up a multiple of four tokens, as two ranks need it."""


def partition(bounds: torch.Tensor, tokens: int, ranks: int, rank: int) -> torch.Tensor:
    """Return the tokens of a rank, as `thd_get_partitioned_indices` of Transformer Engine orders them."""
    ends = bounds.tolist()
    assert ends[-1] == tokens
    places: list[int] = []
    for start, end in itertools.pairwise(ends):
        chunk = (end - start) // (2 * ranks)
        for number in (rank, 2 * ranks - 1 - rank):
            places += range(start + number * chunk, start + (number + 1) * chunk)
    return torch.tensor(places, dtype=torch.int32, device=bounds.device)


def main() -> None:
    """Answer on standard output, from the first rank."""
    rank, meet, *total = sys.argv[1:]
    here = int(rank)
    torch.set_num_threads(1)
    backend = "nccl" if packed_mixer.CUDA else "gloo"
    if packed_mixer.CUDA:
        torch.cuda.set_device(here)
    torch.distributed.init_process_group(backend, init_method=f"file://{meet}", rank=here, world_size=RANKS)
    module = prepare()
    from megatron.core.ssm import mamba_context_parallel as parallel

    if parallel.tex is None:
        parallel.tex = SimpleNamespace(thd_get_partitioned_indices=partition)
        parallel.is_te_min_version = lambda _: True
    mixer = make(module, cp=torch.distributed.group.WORLD)
    fields = {"total_tokens": PACKING.tokens} if total else {}
    params = PACKING.params(module, **fields)
    mine = partition(params.cu_seqlens_q_padded, PACKING.tokens, RANKS, here).long()
    leaf = PACKING.row()[mine].requires_grad_()
    with scans(module) as seen:
        output, _ = mixer(leaf, packed_seq_params=params)
    (output * weights_of(PACKING)[mine]).sum().backward()
    slopes = {name: each.grad for name, each in mixer.named_parameters() if each.grad is not None}
    for each in slopes.values():  # each rank has the gradients of its tokens, or of its heads
        torch.distributed.all_reduce(each)
    whole = [_together(each[:, 0], here) for each in (output.detach(), leaf.grad)]
    if here == 0:
        found = Pass(*whole, slopes)
        true = alone(make(module), PACKING)
        report: dict[str, Any] = {
            "apart": apart(found, true, PACKING),
            "seq_idx": None if seen[0] is None else seen[0].tolist(),
        }
        sys.stdout.write(json.dumps(report))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _together(share: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the whole row from the shares of all ranks."""
    row = torch.zeros(PACKING.tokens, share.shape[1], device=share.device)
    bounds = torch.tensor([0, *_ends()], dtype=torch.int32, device=share.device)
    row[partition(bounds, PACKING.tokens, RANKS, rank).long()] = share
    torch.distributed.all_reduce(row)
    return row


def _ends() -> list[int]:
    assert PACKING.padded is not None
    return [sum(PACKING.padded[: number + 1]) for number in range(len(PACKING.padded))]


if __name__ == "__main__":
    main()
