"""Gradient scale of Megatron's balancing loss over the global batch, the number of data parallel ranks: off unless its variable is `on`.

`global_aux_loss` of a rank is the rank's part of a loss over all data parallel ranks. Gradients of the ranks are averaged, so the router learns
from a loss that is too small by a factor of the number of ranks. The logged value is the sum of the parts, and right.

Upstream's method runs unchanged, on scores whose gradient is multiplied by the number of data parallel ranks. The scores are used by this loss only.
Under a padding mask with `calculate_per_token_loss` gradients are upstream's: there releases disagree about which tokens they multiply by.

The overlay is off by default because coefficients were tuned with upstream's scale.

Source: https://github.com/NVIDIA/Megatron-LM/issues/3672, https://github.com/NVIDIA/Megatron-LM/pull/5007
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import global_aux_loss_scale as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime.bare_instances import bare
from megacpp_overlays.runtime.gradients import gradients
from megacpp_overlays.runtime.in_this_thread import answer


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    import torch

    class TimesRanks(torch.autograd.Function):  # type: ignore[misc]
        """Scores as they are, whose gradient is multiplied by a number."""

        @staticmethod
        def forward(ctx: Any, scores: Any, ranks: int) -> Any:
            ctx.ranks = ranks
            return scores.view_as(scores)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
            return gradient * ctx.ranks, None

    def _apply_global_aux_loss(
        self: Any, probs: Any, scores_for_aux_loss: Any, routing_map: Any, *masked: Any, **more: Any
    ) -> Any:
        is_masked = more.get("with_padding_mask", any(masked))
        ranks = (
            self.tp_dp_cp_group.size() // self.tp_cp_group.size() if self.get_aux_loss_coeff("global_aux_loss") else 1
        )
        if ranks > 1 and not (is_masked and self.calculate_per_token_loss):
            scores_for_aux_loss = TimesRanks.apply(scores_for_aux_loss, ranks)
        return original(self, probs, scores_for_aux_loss, routing_map, *masked, **more)

    return _apply_global_aux_loss


_RANKS, _TOKENS, _EXPERTS = 4, 2, 2
_SUMS = ("get_tokens_per_expert_and_token_count", "reduce_from_tensor_model_parallel_region")
"""Functions that count tokens of all ranks, or add counts up: one of them is there."""


def observe(module: ModuleType) -> Observation:
    """Attach the loss of one of four ranks on the CPU, all data parallel and then sharing a batch, and take its gradient."""
    theirs = {name: vars(module)[name] for name in _SUMS if name in vars(module)}
    ours = {_SUMS[0]: _counted, _SUMS[1]: lambda counts, _group: counts * _RANKS}
    vars(module).update({name: answer(ours[name], each) for name, each in theirs.items()})
    try:
        found = [_gradient(module, ranks_of_a_batch) for ranks_of_a_batch in (1, _RANKS)]
    finally:
        vars(module).update(theirs)
    share = _EXPERTS * _RANKS / (_RANKS * _TOKENS) ** 2  # each expert gets each token of every rank
    right = [share * _RANKS * _TOKENS, share * _TOKENS]
    return Observation(
        broken=any(abs(one - other) > right[1] / 10 for one, other in zip(found, right, strict=True)),
        seen=f"the gradient of a score over {_RANKS} data parallel ranks is {found[0]:.4f}, {right[0]:.4f} is right; over ranks of one batch "
        f"{found[1]:.4f}",
    )


def _counted(*_: Any, **__: Any) -> tuple[Any, int, int]:
    """Return tokens of each expert, of the rank, and of all ranks."""
    import torch

    return torch.full((_EXPERTS,), float(_RANKS * _TOKENS), device="cpu"), _TOKENS, _RANKS * _TOKENS


def _gradient(module: ModuleType, ranks_of_a_batch: int) -> float:
    """Return the gradient of the loss by one score, with so many ranks that share a batch."""
    import torch

    with torch.inference_mode(False), torch.enable_grad():
        scores = torch.full((_TOKENS, _EXPERTS), 0.5, dtype=torch.float32, device="cpu", requires_grad=True)
        router = bare(
            getattr(module, feature.ROUTER),
            config=SimpleNamespace(
                num_moe_experts=_EXPERTS,
                num_layers=1,
                mtp_num_layers=None,
                mtp_use_repeated_layer=False,
                moe_router_fusion=False,
            ),
            get_aux_loss_coeff=lambda _: 1.0,
            topk=1,
            ga_steps=torch.zeros((), device="cpu"),
            global_tokens_per_expert=torch.zeros(_EXPERTS, device="cpu"),
            calculate_per_token_loss=False,
            is_mtp_layer=False,
            layer_number=None,  # for which nothing is logged
            tp_cp_group=SimpleNamespace(size=lambda: ranks_of_a_batch),
            tp_dp_cp_group=SimpleNamespace(size=lambda: _RANKS),
        )
        routed = torch.ones(_TOKENS, _EXPERTS, device="cpu")
        probs = torch.zeros(1, device="cpu", requires_grad=True) * 1.0
        attached = router._apply_global_aux_loss(probs, scores, routed)  # noqa: SLF001 - the target
        (loss,) = attached.grad_fn.saved_tensors
        (gradient,) = gradients(loss, scores)
    return float(gradient[0, 0])


OVERLAY = Overlay(
    id="global-aux-loss-scale",
    pack=53,
    title="let gradients of the MoE balancing loss over the global batch add up over data parallel ranks",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.DIVIDED: (Replacement(symbol=feature.METHOD, make=_make),)},
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=True,
    symptoms=(
        "global_aux_loss balances experts worse on more GPUs",
        "`global_aux_loss` hardly balances experts",
        "gradient of global_aux_loss shrinks with data parallel ranks",
    ),
    concerns="experts and global_aux_loss",
    breaks="with global_aux_loss gradients of the MoE balancing loss are as many times too small as there are data parallel ranks",
    retire_when="gradients of global_aux_loss do not depend on the number of data parallel ranks",
    brief="MoE balancing over the global batch",
    until="its gradients add up",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=3672, state="open, opened 2026-03-03"),
        Thread(repository="NVIDIA/Megatron-LM", number=5007, state="open, opened 2026-05-27: a repair"),
        Thread(repository="NVIDIA/Megatron-LM", number=3768, state="closed, opened 2026-03-10: the same for dev"),
        Thread(repository="NVIDIA/Megatron-LM", number=3769, state="closed, opened 2026-03-10: an earlier repair"),
    ),
    last_validated="2026-11-27, x86-64 without GPU, torch 2.11.0: megatron-core 0.15.0, 0.16.1, 0.18.2 and 0.19.2, main d98e8a64dd and dev "
    "d48bd6be0a; 0.15.0 to 0.19.2 read",
)
