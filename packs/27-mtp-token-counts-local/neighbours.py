"""Losses of Megatron's multi-token prediction that are right without the overlay: on one rank, as means, of ranks that count alike or
have context parallel groups of their own."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Neighbour, TargetAbsent, beside, on_ranks

PACK = beside(__file__)
LAYERS, TOKENS = 2, len(PACK.ROWS[0])
ALIKE = (PACK.ROWS[1], PACK.ROWS[1])
"""Masks of as many tokens, also in further predictions."""
ALL = (None, None)
"""The same where no token is masked."""
ROUNDING: dict[str, Any] = {
    "rounding": 1e-6,
    "why_rounding": "a quotient of counts in float64 stands for two in float32",
}


def _learnt(
    ranks: int, *, masks: Any = PACK.ROWS, per_token: bool = True, own_groups: bool = False, no_labels: bool = False
) -> Mapping[str, object]:
    """Return what data parallel ranks learn from further predictions, and what they log of them.

    Args:
        ranks: how many.
        masks: of each, one row; None where all tokens count.
        per_token: whether losses are summed over tokens.
        own_groups: whether callers give context parallel groups that are not those of the process.
        no_labels: whether callers give token ids alone, as in reinforcement learning.
    """
    module: Any = importlib.import_module(PACK.MODULE)
    if not hasattr(module, "process_mtp_loss"):
        raise TargetAbsent("there is no process_mtp_loss")
    if no_labels and "input_ids" not in inspect.signature(module.process_mtp_loss).parameters:
        raise TargetAbsent("process_mtp_loss takes no token ids")

    def on_rank(rank: int) -> Mapping[str, Any]:
        import torch
        from megatron.core import parallel_state

        torch.cuda.current_device = lambda: torch.device("cpu")
        parallel_state.initialize_model_parallel()
        groups = [torch.distributed.new_group([each]) for each in range(ranks)]
        mask = None if masks[rank] is None else torch.tensor(masks[rank])[None].float()
        generator = torch.Generator().manual_seed(27 + rank)
        states = torch.randn((1 + LAYERS) * TOKENS, 1, 1, generator=generator).requires_grad_()
        weight = torch.tensor([1.5], requires_grad=True)
        ids = torch.randint(4, (1, TOKENS), generator=generator)
        config = SimpleNamespace(
            mtp_num_layers=LAYERS,
            mtp_loss_scaling_factor=0.3,
            mtp_detach_heads=False,
            calculate_per_token_loss=per_token,
            hybrid_context_parallel=False,
            cross_entropy_loss_fusion=False,
        )
        output = module.process_mtp_loss(
            hidden_states=states,
            labels=None if no_labels else ids,
            loss_mask=mask,
            output_layer=lambda states, **_: (states * weight, None),
            output_weight=None,
            runtime_gather_output=True,
            is_training=True,
            compute_language_model_loss=lambda labels, logits: (logits[..., 0].transpose(0, 1) - labels) ** 2,
            config=config,
            cp_group=groups[rank] if own_groups else parallel_state.get_context_parallel_group(),
            **({"input_ids": ids} if no_labels else {}),
        )
        (output * torch.arange(1.0, 1.0 + TOKENS)[:, None, None]).sum().backward()
        logged = {name: each for name, each in module.MTPLossLoggingHelper.tracker.items() if hasattr(each, "numel")}
        return {"states": output, "gradient of states": states.grad, "gradient of weight": weight.grad, **logged}

    return on_ranks(ranks, on_rank)


def _neighbour(name: str, *arguments: Any, rounding: float = 0.0, why_rounding: str = "", **options: Any) -> Neighbour:
    return Neighbour(
        name=name,
        overlay="mtp-token-counts-local",
        run=functools.partial(_learnt, *arguments, **options),
        rounding=rounding,
        why_rounding=why_rounding,
    )


NEIGHBOURS = (
    _neighbour("one-rank", 1),
    _neighbour("means", 2, per_token=False),
    _neighbour("groups-of-their-own", 2, own_groups=True),
    _neighbour("ranks-that-count-alike", 2, masks=ALL, **ROUNDING),
    _neighbour("ranks-that-count-alike-without-labels", 2, masks=ALIKE, no_labels=True, **ROUNDING),
)
