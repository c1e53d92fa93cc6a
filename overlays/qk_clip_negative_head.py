"""Clipping of query and key weights in Megatron's attention without a change of heads below the threshold.

Upstream's `clip_qk` runs with largest logits that are raised to half the threshold: their factor is two, and so one at most. Logits above the threshold,
and all factors that were right, are unchanged. Where upstream raises, the logits are restored.

Source: https://github.com/NVIDIA/Megatron-LM/pull/7517
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import qk_clip_negative_head as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Target, Thread
from megacpp_overlays.runtime.bare_instances import bare


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    import torch

    def clip_qk(self: Any, **more: Any) -> Any:
        core, threshold = self.core_attention, self.config.qk_clip_threshold
        logits = getattr(core, "current_max_attn_logits", None)
        if not isinstance(logits, torch.Tensor) or threshold <= 0:
            return original(self, **more)
        core.current_max_attn_logits = logits.clamp(min=threshold / 2)  # whatever the dtype, no more than it
        try:
            return original(self, **more)
        except BaseException:
            core.current_max_attn_logits = logits
            raise

    return clip_qk


def _observe(cls: str, module: ModuleType) -> Observation:
    """Clip three heads whose largest logits are twice the threshold, negative and zero."""
    import torch

    weight = SimpleNamespace(weight=torch.ones(1, device="cpu"))
    layers = ("linear_qkv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
    clips = ("_clip_linear_qkv", "_clip_q_proj_weight", "_clip_kv_proj_weight")
    attention = bare(
        getattr(module, cls),
        config=SimpleNamespace(qk_clip=True, qk_clip_threshold=1.0, q_lora_rank=None),
        core_attention=SimpleNamespace(current_max_attn_logits=torch.tensor([2.0, -1.0, 0.0], device="cpu")),
        cache_mla_latents=False,
        **dict.fromkeys(("num_attention_heads_per_partition", "num_query_groups_per_partition"), 3),
        **dict.fromkeys(layers, weight),
        **dict.fromkeys(clips, lambda given: given),
    )
    attention.clip_qk()
    factors = attention.qk_clip_balancing_eta.flatten().tolist()
    return Observation(broken=factors != [0.5, 1.0, 1.0], seen=f"factors of 0.5, 1 and 1 are {factors}")


def _part(target: Target, probe: Callable[..., Any]) -> Overlay:
    def observe(module: ModuleType) -> Observation:
        return _observe(target.symbol.partition(".")[0], module)

    return Overlay(
        id="qk-clip-negative-head",
        pack=50,
        title="leave heads below the threshold as they are where query and key weights are clipped",
        target=target,
        probe=probe,
        replacements={feature.DIVIDED: (Replacement(symbol=target.symbol, make=_make),)},
        unsupported={},
        witness=observe,
        self_test=observe,
        opt_in=False,
        symptoms=(
            "NaN in one head with `qk_clip`",
            "weights of a head become NaN after a clip of query and key weights",
            "loss is NaN after a step with `qk_clip`",
        ),
        concerns="qk_clip",
        breaks="with qk_clip, when a head is clipped, weights of a head whose largest logit is negative become NaN, and rotary rows grow "
        "with a negative factor",
        brief="QK clipping of negative heads",
        until="clip_qk clamps denominators",
        retire_when="SelfAttention and MLASelfAttention divide the threshold by nothing less than itself",
        threads=(
            Thread(repository="NVIDIA/Megatron-LM", number=7517, state="open, opened 2026-09-19: a repair"),
            Thread(repository="NVIDIA/Megatron-LM", number=7382, state="closed, opened 2026-09-16: a repair of MLA"),
        ),
        last_validated="2026-11-27, x86-64 without GPU, torch 2.11.0: megatron-core 0.16.1, 0.18.2 and 0.19.2, main d98e8a64dd and dev "
        "d48bd6be0a; 0.16.0 to 0.19.2 read",
    )


PARTS = (_part(feature.GROUPED, feature.probe), _part(feature.LATENT, feature.probe_latent))
OVERLAY, LATENT = PARTS
