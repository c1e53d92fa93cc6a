"""Token counts that scale balancing losses of MoE routers under a padding mask.

Where losses are taken for each token, gradients are divided by all tokens in the end. So a router multiplies its
balancing loss by the tokens of its rank and by the number of ranks. Under a padding mask it reads the tokens of its
rank from sums that were added up over ranks in place, and its gradient is too large by a factor of the number of ranks.

Each rank has a part of one loss. All parts must be multiplied by the same number to add up to its gradient. Without a
mask all ranks have as many tokens. Under a mask the seam gives each rank an equal fraction of all tokens. The rank's own number of
tokens, which an open pull request uses, would weight its part by its lack of padding.

Source: https://github.com/NVIDIA/Megatron-LM/issues/7452, https://github.com/NVIDIA/Megatron-LM/pull/7481
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import masked_aux_loss_tokens as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime.in_this_thread import answer


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def get_tokens_per_expert_and_token_count(
        routing_map: Any, reduce_group: Any, topk: Any = None, with_padding_mask: Any = False
    ) -> tuple[Any, Any, Any]:
        experts, local, total = original(routing_map, reduce_group, topk, with_padding_mask)
        if with_padding_mask:
            local = total / reduce_group.size()
        return experts, local, total

    return get_tokens_per_expert_and_token_count


_RANKS, _TOP = 2, 2


def observe(module: ModuleType) -> Observation:
    """Count the tokens of one of two ranks with as many, under a mask and without one: three on each."""
    import torch

    def summed(values: Any, _group: Any) -> Any:
        return values.mul_(_RANKS)

    group = SimpleNamespace(size=lambda: _RANKS)
    routed = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1]], device="cpu")
    theirs = module.reduce_from_tensor_model_parallel_region
    module.reduce_from_tensor_model_parallel_region = answer(summed, theirs)  # type: ignore[attr-defined]
    try:
        counts = [
            getattr(module, feature.FUNCTION)(routed.clone(), group, topk=_TOP, with_padding_mask=is_masked)
            for is_masked in (True, False)
        ]
    finally:
        module.reduce_from_tensor_model_parallel_region = theirs  # type: ignore[attr-defined]
    found = [(experts.tolist(), float(local), float(total)) for experts, local, total in counts]
    right = ([4, 4, 4], 3.0, 6.0)
    return Observation(
        broken=found != [right, right],
        seen=f"of {int(found[0][2])} tokens on {_RANKS} ranks {found[0][1]:g} are a rank's under a mask, "
        f"{found[1][1]:g} without one",
    )


OVERLAY = Overlay(
    id="masked-aux-loss-tokens",
    pack=41,
    title="multiply balancing losses under a padding mask by the tokens of a rank",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.COUNTED_TWICE: (Replacement(symbol=feature.FUNCTION, make=_make),)},
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "load balancing loss is too strong with a padding mask",
        "aux loss grows with the number of ranks, with calculate_per_token_loss",
    ),
    concerns="experts and per_token_loss",
    breaks="with calculate_per_token_loss and a padding mask gradients of MoE balancing losses are as many times too large "
    "as ranks share a batch",
    retire_when="under a padding mask balancing losses are multiplied by the same share of all tokens on each rank",
    brief="MoE balancing losses under masks",
    until="they count tokens once",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=7452, state="open, opened 2026-09-17: finding 10"),
        Thread(repository="NVIDIA/Megatron-LM", number=7481, state="open, opened 2026-09-18: counts before the sum"),
    ),
    last_validated="2026-11-23, x86-64 without GPU, torch 2.11.0: megatron-core 0.19.0, 0.19.2 and main d98e8a64dd on two "
    "gloo ranks, 0.19.2 on four; 0.16.0 to 0.19.2 read",
)
