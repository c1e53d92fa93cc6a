"""Megatron's multi-token prediction with `calculate_per_token_loss` on two ranks: is its gradient that of the mean over all tokens?

The real `process_mtp_loss` runs forward and backward on two ranks, which are forked and meet with gloo. Gradients of a shared
weight, and the tokens that are trained on, are summed over ranks, and the one is divided by the other, as
`finalize_model_grads` does. Each token's loss is the weight times a number of its own, so the right gradient is the mean of
these over all tokens of a second prediction.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import tempfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent

MODULE = "megatron.core.transformer.multi_token_prediction"
RANKS = 2
ROUNDING = 1e-4

ROWS = ((1, 1, 0, 0, 0, 0), (1, 1, 1, 1, 0, 0))
"""Masks of data parallel ranks: 2 and 4 tokens, of which a second prediction has 1 and 3."""
NUMBERS = (10.0, 2.0)
"""Of every token of either."""
WHOLE = (0, 0, 1, 1, 1, 0, 0, 0)
"""The mask of a document that context parallel ranks share: all of its tokens are the second rank's, one of its targets the first's."""
CHUNKS = ((0, 1, 6, 7), (2, 3, 4, 5))
OF_WHOLE = (4.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


def _data_parallel() -> Behaviour:
    """Give each rank a row of its own."""
    shares = [(mask, (number,) * len(mask)) for mask, number in zip(ROWS, NUMBERS, strict=True)]
    return _compare(shares, Fraction(1 * 10 + 3 * 2, 4), context_parallel=1)


def _context_parallel() -> Behaviour:
    """Cut one document in two chunks for each rank."""
    shares = [tuple(tuple(row[place] for place in mine) for row in (WHOLE, OF_WHOLE)) for mine in CHUNKS]
    return _compare(shares, Fraction(4 + 1 + 1, 3), context_parallel=RANKS)


def _compare(shares: list[Any], right: Fraction, *, context_parallel: int) -> Behaviour:
    module = importlib.import_module(MODULE)
    if not hasattr(module, "process_mtp_loss"):
        raise TargetAbsent("there is no process_mtp_loss, and no share of tokens in the loss of multi-token prediction")
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_on_rank, args=(module, rank, folder, share, context_parallel))
            for rank, share in enumerate(shares)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]
    name = "context" if context_parallel > 1 else "data"
    return Behaviour(
        broken=any(abs(each - right) > ROUNDING for each in found),
        seen=f"two {name} parallel ranks: the gradient is {found[0]:.4f}, the mean over all tokens {float(right):.4f}",
    )


def _on_rank(module: ModuleType, rank: int, folder: str, share: Any, context_parallel: int) -> None:
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    parallel_state.initialize_model_parallel(context_parallel_size=context_parallel)
    mask, numbers = (torch.tensor(each)[None].float() for each in share)
    weight = torch.ones((), requires_grad=True)
    _loss(module, mask, numbers, lambda states: states * weight, shared=context_parallel > 1).sum().backward()
    summed = torch.stack([torch.zeros(()) if weight.grad is None else weight.grad, mask.sum()])
    torch.distributed.all_reduce(summed)
    Path(folder, str(rank)).write_text(json.dumps(float(summed[0] / summed[1])))
    torch.distributed.destroy_process_group()


def _loss(module: ModuleType, mask: Any, numbers: Any, output: Callable[[Any], Any], *, shared: bool) -> Any:
    """Run the loss of one more prediction for this rank's tokens; of the numbers, [1, tokens], each is the loss of its own."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, len(WHOLE)], dtype=torch.int32)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds) if shared else None
    states = torch.cat([torch.zeros_like(numbers), numbers], dim=1).transpose(0, 1)[..., None].requires_grad_()
    config = SimpleNamespace(
        mtp_num_layers=1,
        mtp_loss_scaling_factor=1.0,
        mtp_detach_heads=False,
        calculate_per_token_loss=True,
        hybrid_context_parallel=False,
        cross_entropy_loss_fusion=False,
    )
    return module.process_mtp_loss(
        hidden_states=states,
        labels=torch.zeros_like(mask, dtype=torch.int64),
        loss_mask=mask,
        output_layer=lambda states, **_: (output(states), None),
        output_weight=None,
        runtime_gather_output=None,
        is_training=False,
        compute_language_model_loss=lambda _labels, logits: logits[..., 0].transpose(0, 1),
        config=config,
        cp_group=parallel_state.get_context_parallel_group(),
        packed_seq_params=params,
    )


def _case(name: str, run: Callable[[], Behaviour]) -> Case:
    return Case(
        name=name,
        overlay="mtp-token-counts-local",
        device="cpu",
        versions=("torch",),
        run=run,
        targets=(MODULE,),
    )


CASES = (_case("data-parallel-cpu", _data_parallel), _case("context-parallel-cpu", _context_parallel))
