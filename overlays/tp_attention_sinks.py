"""Mark learnable attention sinks as what they are: each tensor parallel rank has those of its own heads.

Norms count a parameter that is not marked on the first rank only. So the norm by which gradients are clipped, and counts of zeros, lack the sinks of
all other ranks.

The constructor that self-attention and cross-attention have from their base runs as it is. If the core that it made has sinks that are a parameter and that nobody marked, they get
the three attributes that a column of a linear layer has. They are set before an optimizer copies them. Checkpoints know of the shares already.
Multi-latent attention makes its core in a constructor of its own, and its sinks, which only Transformer Engine's core has, are not marked.

Source: https://github.com/NVIDIA/Megatron-LM/pull/7530
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import tp_attention_sinks as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread

_SHARE = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    from torch.nn import Parameter

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it becomes a constructor
        original(self, *args, **kwargs)
        sinks = getattr(self.core_attention, feature.SINKS, None)
        if isinstance(sinks, Parameter) and not hasattr(sinks, "tensor_model_parallel"):
            for name, value in _SHARE.items():
                setattr(sinks, name, value)

    return __init__


_MARKED = {"tensor_model_parallel": False}


def observe(module: ModuleType) -> Observation:
    """Let the real constructors make attentions of cores whose sinks are a parameter, one that is marked, a tensor, and none."""
    found = {
        name: [_marks(module, name, kind) for kind in ("parameter", "marked", "tensor", "none")]
        for name in feature.CLASSES
    }
    right = [_SHARE, _MARKED, {}, None]
    seen = ", ".join(f"of {name} with {marks[0]}" for name, marks in found.items())
    return Observation(broken=any(each != right for each in found.values()), seen=f"sinks are marked {seen}")


def _marks(module: ModuleType, name: str, kind: str) -> dict[str, Any] | None:
    """Return what marks the sinks of an attention; None where there are none.

    Args:
        module: the target.
        name: of the class of the attention.
        kind: of sinks.
    """
    import torch

    sinks: Any = None if kind == "none" else torch.zeros(2, device="cpu")
    if kind in {"parameter", "marked"}:
        sinks = torch.nn.Parameter(sinks)
    if kind == "marked":
        vars(sinks).update(_MARKED)

    class Core(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, **_: Any) -> None:
            super().__init__()
            self.softmax_offset = sinks

    class LinearPart(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

    method = torch.nn.init.zeros_
    config = _WithoutYarn(
        hidden_size=2,
        num_attention_heads=2,
        num_query_groups=2,
        kv_channels=1,
        init_method=method,
        output_layer_init_method=method,
    )
    parts = _PartsAsAsked(
        core_attention=Core, **dict.fromkeys(("linear_proj", "linear_q", "linear_kv", "linear_qkv"), LinearPart)
    )
    groups = SimpleNamespace(tp=None, cp=None, tp_cp=None)
    getattr(module, name)(config, parts, layer_number=1, pg_collection=groups)
    return None if sinks is None else {mark: value for mark, value in vars(sinks).items() if mark in _SHARE}


class _PartsAsAsked(SimpleNamespace):
    """Has None for whatever else upstream asks for."""

    def __getattr__(self, name: str) -> None:
        return None


class _WithoutYarn(_PartsAsAsked):
    """Has no YaRN either, which upstream asks whether it is there."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("yarn"):
            raise AttributeError(name)
        return super().__getattr__(name)


OVERLAY = Overlay(
    id="tp-attention-sinks",
    pack=37,
    title="mark learnable attention sinks as shares of tensor parallel ranks",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.NOT_MARKED: (Replacement(symbol=feature.BASE, make=_make),)},
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    breaks="the norm by which gradients are clipped lacks the learnable attention sinks of all tensor parallel ranks but the first",
    retire_when="DotProductAttention and TEDotProductAttention mark softmax_offset as tensor parallel",
    brief="norms without attention sinks under TP",
    until="cores mark softmax_offset",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=7530, state="open, opened 2026-09-20: a repair"),
        Thread(repository="NVIDIA/Megatron-LM", number=7452, state="open, opened 2026-09-17: finding 8"),
    ),
    last_validated="2026-11-23, x86-64 without GPU, torch 2.11.0: megatron-core 0.15.0, 0.16.1, 0.17.1, 0.18.2 and 0.19.2, main "
    "d98e8a64dd and dev d48bd6be0a on two gloo ranks; 0.15.0 to 0.19.2 read",
)
