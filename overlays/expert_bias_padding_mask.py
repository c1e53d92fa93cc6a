"""Token counts of Megatron's routers for the bias of experts, without padding.

Upstream applies the mask of tokens along the axis of experts, which raises or counts padding. Here padding is first removed from the map of
tokens and experts, and upstream counts the rest without a mask. Upstream runs with its own arguments without a mask, without an expert bias,
without gradients, and where the mask does not match the map's tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megacpp_overlays.feature_probes import expert_bias_padding_mask as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime.bare_instances import bare


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    import torch

    def _apply_expert_bias(self: Any, routing_map: Any, padding_mask: Any = None, **more: Any) -> Any:
        counts = padding_mask is not None and self.enable_expert_bias and torch.is_grad_enabled()
        if not counts or padding_mask.numel() != routing_map.shape[0]:
            return original(self, routing_map, padding_mask, **more)
        return original(self, routing_map & ~padding_mask.reshape(-1, 1), None, **more)

    return _apply_expert_bias


_MAP = ((1, 1, 0), (1, 0, 1), (0, 1, 1))
"""Experts of three tokens, of which the last two are padding."""
_MASK = (False, True, True)
_PADDED = 4
"""Tokens, for a map that is not square."""


def observe(module: ModuleType) -> Observation:
    """Let the real method count three and four tokens of three experts, all but one of them padding."""
    import torch

    seen, broken = [], False
    with torch.inference_mode(False), torch.enable_grad(), _eagerly():
        for tokens in (len(_MAP), _PADDED):
            router = bare(
                module.TopKRouter,
                enable_expert_bias=True,
                local_tokens_per_expert=torch.zeros(len(_MAP), dtype=torch.float32, device="cpu"),
            )
            rows = [_MAP[min(each, len(_MAP) - 1)] for each in range(tokens)]
            chosen = torch.tensor(rows, dtype=torch.bool, device="cpu")
            mask = torch.tensor([_MASK[min(each, len(_MAP) - 1)] for each in range(tokens)], device="cpu")
            found: list[object] = []
            try:
                router._apply_expert_bias(chosen, mask)  # noqa: SLF001 - the replaced method
                found += [int(each) for each in router.local_tokens_per_expert]
            except RuntimeError as error:
                found += [type(error).__name__]
            broken |= found != [*_MAP[0]]
            seen.append(f"of {tokens}: {found}")
    return Observation(broken=broken, seen=f"counts of 3 experts, where {list(_MAP[0])} is right, {', '.join(seen)}")


def _eagerly() -> contextlib.AbstractContextManager[Any]:
    """Return a context without compilation, where torch supports it."""
    import torch

    stance = getattr(torch.compiler, "set_stance", None)
    return contextlib.nullcontext() if stance is None else stance("force_eager")


OVERLAY = Overlay(
    id="expert-bias-padding-mask",
    pack=34,
    title="leave padding out where tokens are counted for the bias of experts",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.OVER_EXPERTS: (Replacement(symbol=feature.COUNT, make=_make),)},
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "shape mismatch in the router with an expert bias and a padding mask",
        "expert bias counts padding tokens",
        "MoE training with a padding mask ends in an error",
    ),
    concerns="experts and expert_bias",
    breaks="training with a padding mask and an expert bias ends in an error, or counts padding where there are as many tokens as experts",
    brief="expert bias under padding masks",
    until="_apply_expert_bias masks tokens",
    retire_when="TopKRouter._apply_expert_bias lays the padding mask over tokens",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=6114, state="merged 2026-08-20, in no release"),
        Thread(repository="NVIDIA/Megatron-LM", number=6111, state="closed, seen 2026-11-23"),
    ),
    last_validated="2026-11-23, x86-64 without GPU, torch 2.11.0: megatron-core 0.16.1, 0.18.2 and 0.19.2; 0.16.0 to 0.19.2, main d98e8a64dd "
    "and dev d48bd6be0a read",
)
