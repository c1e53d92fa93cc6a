"""Tensor parallel attributes of learnable attention sinks. Each rank has the sinks of its own heads.

Norms count a parameter without these attributes on the first rank only. So the norm by which gradients are clipped, and counts of zeros, lack the sinks of
all other ranks.

The constructor that self-attention and cross-attention inherit runs unchanged. If the core that it made has sinks that are a parameter without these attributes, they get
the three attributes that the weight of a column-parallel layer has. They are set before an optimizer copies them. Checkpoints already save the sinks as shards.
The constructor of multi-latent attention, which makes its own core, has the same seam: Transformer Engine's core has sinks there.

Source: https://github.com/NVIDIA/Megatron-LM/pull/7530
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import tp_attention_sinks as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Target, Thread
from megacpp_overlays.runtime.in_this_thread import answer

BASE = "Attention.__init__"
"""The constructor of both classes' base, which makes the core."""

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


_KINDS = ("parameter", "marked", "tensor", "none")
"""Kinds of sinks of a core in the observations."""
_RIGHT: list[dict[str, Any] | None] = [_SHARE, _MARKED, {}, None]


def observe(module: ModuleType) -> Observation:
    """Read the attributes after the real constructors, for cores whose sinks are a parameter, a marked parameter, a tensor, and none."""
    found = {name: [_marks(module, name, kind) for kind in _KINDS] for name in feature.CLASSES}
    seen = ", ".join(f"of {name} with {marks[0]}" for name, marks in found.items())
    return Observation(broken=any(each != _RIGHT for each in found.values()), seen=f"sinks are marked {seen}")


def observe_latent(module: ModuleType) -> Observation:
    """Read the attributes after the real constructor of multi-latent attention, for the same cores."""
    found = [_latent_marks(module, kind) for kind in _KINDS]
    return Observation(broken=found != _RIGHT, seen=f"sinks of a latent attention are marked with {found[0]}")


def _marks(module: ModuleType, name: str, kind: str) -> dict[str, Any] | None:
    """Return the tensor parallel attributes of the sinks of an attention; None where there are no sinks.

    Args:
        module: the target.
        name: of the class of the attention.
        kind: of sinks.
    """
    parts = ("linear_proj", "linear_q", "linear_kv", "linear_qkv")
    submodules = _NoneNamespace(core_attention=_core(kind), **dict.fromkeys(parts, _part()))
    return _marks_of(getattr(module, name)(_config(), submodules, layer_number=1, pg_collection=_GROUPS))


def _latent_marks(module: ModuleType, kind: str) -> dict[str, Any] | None:
    """Return the tensor parallel attributes of the sinks of a multi-latent attention; None where there are no sinks."""
    part = _part()

    class Attention(getattr(module, feature.LATENT_CLASS)):  # type: ignore[misc]
        def get_query_key_value_tensors(self, *_: Any, **__: Any) -> None:
            """Compute nothing."""

    given = {"layer_number": 1, "attn_mask_type": None, "attention_type": "self", "pg_collection": _GROUPS}
    # Its table would be made on a GPU. Releases without Transformer Engine may ask for a class of it all the same.
    changed = {"RotaryEmbedding": answer(part, module.RotaryEmbedding)}
    if not isinstance(getattr(module, "TELinear", type), type):
        changed["TELinear"] = type("TELinear", (), {})
    theirs = {name: getattr(module, name) for name in changed}
    try:
        vars(module).update(changed)
        return _marks_of(Attention(_config(), _NoneNamespace(core_attention=_core(kind), linear_proj=part), **given))
    finally:
        vars(module).update(theirs)


def _marks_of(attention: Any) -> dict[str, Any] | None:
    sinks = attention.core_attention.softmax_offset
    return None if sinks is None else {mark: value for mark, value in vars(sinks).items() if mark in _SHARE}


_GROUPS = SimpleNamespace(tp=None, cp=None, tp_cp=None)


def _config() -> _WithoutYarn:
    """Return the fields of a configuration that constructors of attention compute with."""
    import torch

    sizes = {"hidden_size": 2, "num_attention_heads": 2, "num_query_groups": 2, "kv_channels": 1}
    latent = {"qk_head_dim": 1, "qk_pos_emb_head_dim": 2, "v_head_dim": 1, "rope_type": "rope"}
    scales = {"rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    method = torch.nn.init.zeros_
    return _WithoutYarn(**sizes, **latent, **scales, init_method=method, output_layer_init_method=method)


def _core(kind: str) -> type:
    """Return a class of cores with sinks of a kind."""
    import torch

    class Core(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, **_: Any) -> None:
            super().__init__()
            sinks: Any = None if kind == "none" else torch.zeros(2, device="cpu")
            if kind in {"parameter", "marked"}:
                sinks = torch.nn.Parameter(sinks)
            if kind == "marked":
                vars(sinks).update(_MARKED)
            self.softmax_offset = sinks

    return Core


def _part() -> type:
    """Return a class of parts that take any arguments."""
    import torch

    class AnyPart(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

    return AnyPart


class _NoneNamespace(SimpleNamespace):
    """Namespace whose missing attributes are None."""

    def __getattr__(self, name: str) -> None:
        return None


class _WithoutYarn(_NoneNamespace):
    """The same without attributes of YaRN, whose existence upstream tests."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("yarn"):
            raise AttributeError(name)
        return super().__getattr__(name)


def _overlay(target: Target, probe: Callable[..., Any], symbol: str, watch: Callable[..., Observation]) -> Overlay:
    return Overlay(
        id="tp-attention-sinks",
        pack=37,
        title="mark learnable attention sinks as shares of tensor parallel ranks",
        target=target,
        probe=probe,
        replacements={feature.NOT_MARKED: (Replacement(symbol=symbol, make=_make),)},
        unsupported={},
        witness=watch,
        self_test=watch,
        opt_in=False,
        symptoms=(
            "grad_norm changes with the TP size, with attention sinks",
            "gradient clipping is too weak with softmax_offset learnable",
        ),
        concerns="attention_sinks and tensor_parallel",
        breaks="the norm by which gradients are clipped lacks the learnable attention sinks of all tensor parallel ranks but the first",
        retire_when="DotProductAttention and TEDotProductAttention mark softmax_offset as tensor parallel",
        brief="norms without attention sinks under TP",
        until="cores mark softmax_offset",
        threads=(
            Thread(repository="NVIDIA/Megatron-LM", number=7530, state="open, opened 2026-09-20: a repair"),
            Thread(repository="NVIDIA/Megatron-LM", number=7452, state="open, opened 2026-09-17: finding 8"),
        ),
        last_validated="2026-11-23, x86-64 without GPU, torch 2.11.0: megatron-core 0.15.0, 0.16.1, 0.17.1, 0.18.2 and 0.19.2, main "
        "d98e8a64dd and dev d48bd6be0a on two gloo ranks; 0.15.0 to 0.19.2 read; multi-latent attention 2026-11-27, without Transformer "
        "Engine: 0.15.0 to 0.19.2 on two gloo ranks, its core a DotProductAttention",
    )


PARTS = (
    _overlay(feature.TARGET, feature.probe, BASE, observe),
    _overlay(feature.LATENT_TARGET, feature.probe_latent, feature.LATENT_CONSTRUCTOR, observe_latent),
)
OVERLAY, LATENT = PARTS
