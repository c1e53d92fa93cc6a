"""Gradient scaling under Torch FSDP2 for losses that are sums over tokens.

With `calculate_per_token_loss` a loss is a sum, and `finalize_model_grads` scales gradients by one over the tokens of the global batch. Torch FSDP2 averages gradients over data and context parallel ranks, so they are also multiplied by
the number of those. A wrapper gets its method when it is made, as Megatron's adapter of Megatron-FSDP does. Classes that scale gradients themselves are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import fsdp2_per_token_loss as feature
from megacpp_overlays.model import Observation, Overlay, Replacement
from megacpp_overlays.runtime.in_this_thread import Instead, answer


def _make(original: Callable[..., None], module: ModuleType) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - the target
        original(self, *args, **kwargs)
        inherited = getattr(getattr(module, feature.WRAPPER).__base__, feature.METHOD)
        if getattr(type(self), feature.METHOD) is inherited:
            setattr(self, feature.METHOD, MethodType(_scale_gradients, self))

    return __init__


def _scale_gradients(self: Any, scaling_factor: Any) -> None:
    """Multiply gradients, which are means over ranks, to make them this many times the sums over ranks."""
    ranks = self.process_group.size()
    for parameter in self.module.parameters():
        if parameter.grad is not None:
            part = parameter.grad
            (part.to_local() if hasattr(part, "to_local") else part).mul_(scaling_factor * ranks)


def observe(module: ModuleType) -> Observation:
    """Let the wrapper of one layer over two ranks, and one that scales by itself, divide a gradient by four; nothing is sharded."""
    import torch

    theirs = {name: vars(module)[name] for name in ("DeviceMesh", "fully_shard")}
    ours = {
        "DeviceMesh": Instead(
            theirs["DeviceMesh"], from_group=answer(lambda *_: None, theirs["DeviceMesh"].from_group)
        ),
        "fully_shard": answer(lambda each, **_: each, theirs["fully_shard"]),
    }
    wrapper = getattr(module, feature.WRAPPER)
    own = type("Own", (wrapper,), {feature.METHOD: lambda *_: None})
    config = SimpleNamespace(transformer_impl="none", recompute_granularity=None)
    group = SimpleNamespace(size=lambda: 2)
    found = []
    vars(module).update(ours)
    try:
        for each in (wrapper, own):
            layer = torch.nn.Linear(1, 1, bias=False, device="cpu")
            made = each(config, SimpleNamespace(), layer, sub_modules_to_wrap=set(), process_group=group)
            layer.weight.grad = torch.ones_like(layer.weight)
            made.scale_gradients(0.25)
            found.append(float(layer.weight.grad))
    finally:
        vars(module).update(theirs)
    right = [0.5, 1.0]
    return Observation(
        broken=found != right,
        seen=f"a mean over two ranks, and one that is scaled elsewhere, become {found}, {right} is right",
    )


OVERLAY = Overlay(
    id="fsdp2-per-token-loss",
    pack=68,
    title="divide gradients under Torch FSDP2 by tokens with calculate_per_token_loss",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.UNSCALED: (Replacement(symbol=feature.TARGET.symbol, make=_make),)},
    unsupported={},
    witness=None,  # upstream may scale in its wrapper, or divide elsewhere
    self_test=observe,
    opt_in=False,
    symptoms=(
        "`grad_norm` is thousands of times too large with Torch FSDP2 and `calculate_per_token_loss`",
        "gradient clipping cuts every step with `use_torch_fsdp2` and `calculate_per_token_loss`",
    ),
    concerns="torch_fsdp2 and per_token_loss",
    breaks="under Torch FSDP2 with calculate_per_token_loss gradients are not divided by tokens: they are as many times too large as a data parallel rank has tokens in a step",
    retire_when="TorchFullyShardedDataParallel scales its gradients",
    brief="FSDP2 and per-token losses",
    until="the wrapper scales gradients",
    threads=(),
    last_validated="2026-11-29, x86-64 without GPU, torch 2.11.0: megatron-core 0.15.3 and 0.19.2, main d98e8a64dd and dev d48bd6be0a, on two gloo ranks; 0.13.0 to 0.19.2 read",
)
