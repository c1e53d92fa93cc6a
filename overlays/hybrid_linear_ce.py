"""Output layer with fused linear cross entropy for Megatron's hybrid model, as in its GPT model.

There are two seams. Both do nothing unless the config has `cross_entropy_loss_fusion` with `cross_entropy_fusion_impl` of
`linear`. After the constructor the output layer's class becomes upstream's own `LinearCrossEntropyModule`. It is the
same object with the same parameter, hooks, and arguments. So state dicts, sharded ones, the tie to the embedding and
code that looks for a class by name (Megatron FSDP does) behave as on a GPT model.

`forward` runs upstream's own code on a proxy of the model. The proxy has another output layer, which returns
the loss, and replaces the two steps after it, which would compute a loss from logits. No attribute of the model is set meanwhile.
The loss is computed in the one call of the layer, where hooks that gather a sharded weight expect its use. Without
labels, as in inference, the layer makes logits as before.

MuP multiplies logits, which are not made here. So the hidden states are multiplied, in the main loss and in that of MTP:
(m h) W' for m (h W'). The result is the same up to one rounding of the hidden states, and exact where the multiplier is a
power of two. Upstream's GPT model does neither: its main loss ends in a TypeError, its MTP loss is not scaled.

As on a GPT model with this loss: a label of -100 counts nothing, `runtime_gather_output` has no effect on a
loss, and acceptance rates of MTP are not counted. The loss excludes MXFP8 for the output projection. GPT raises
a TypeError for both at the first step; the hybrid model raises when it is built.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import hopper_flce_dispatch as dispatch
from megacpp_overlays.feature_probes import hybrid_linear_ce as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread

_FUSED = "fuse_linear_cross_entropy"
"""Attribute of a model whose output layer computes the loss; GPTModel has it, too."""


class _View:
    """Proxy for an object with some attributes replaced. Other attributes are read and set on the object."""

    def __init__(self, seen: Any, **own: Any) -> None:
        for name, value in {**own, "_seen": seen}.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_seen"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_seen"], name, value)


class _LayerThatAnswers(_View):
    """Proxy for an output layer that returns the loss for these labels, and scales the hidden states of any loss."""

    def __call__(self, hidden: Any, *, output_cross_entropy_loss: bool = False, **arguments: Any) -> Any:
        layer, scale, labels = (vars(self)[name] for name in ("_seen", "_scale", "_labels"))
        if not output_cross_entropy_loss and labels is None:
            return layer(hidden, **arguments)
        scaled = hidden if scale == 1.0 else hidden * scale
        if output_cross_entropy_loss:
            return layer(scaled, output_cross_entropy_loss=True, **arguments)
        return layer(scaled, output_cross_entropy_loss=True, labels=labels, **arguments), None


def _view(model: Any, labels: Any) -> _View:
    """Return the proxy of the model for upstream's forward."""
    scale = model.config.mup_output_mult if model.config.use_mup else 1.0
    own: dict[str, Any] = {"output_layer": _LayerThatAnswers(model.output_layer, _scale=scale, _labels=labels)}
    if labels is not None:
        own["_scale_logits"] = lambda loss: loss
        own["compute_language_model_loss"] = lambda _labels, loss: loss
    return _View(model, **own)


def _fuse_output_layer(model: Any, layer_class: type, fp8_utils: ModuleType) -> None:
    """Change the class of a new model's output layer to the one that computes the loss, where the config asks for it.

    Raises:
        ValueError: the config asks for an MXFP8 output projection, too.
        TypeError: the output layer is not the one that upstream makes.
    """
    config = model.config
    fused = bool(config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "linear")
    setattr(model, _FUSED, fused)
    layer = getattr(model, "output_layer", None)
    if not fused or layer is None:
        return
    mxfp8 = getattr(fp8_utils, "is_mxfp8_output_proj_active", None)  # not in every tree that has the fused layer
    if mxfp8 is not None and mxfp8(config):
        raise ValueError(
            'fp8_output_proj computes logits in MXFP8 and cross_entropy_fusion_impl="linear" computes none: '
            'turn fp8_output_proj off, or choose "native"'
        )
    (plain,) = layer_class.__bases__
    if type(layer) is not plain:
        raise TypeError(f"the output layer is a {type(layer).__qualname__}, not the {plain.__qualname__} of upstream")
    layer.__class__ = layer_class


def _constructor(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    layer_class, fp8_utils = _upstream_parts()

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it becomes a constructor
        original(self, *args, **kwargs)
        _fuse_output_layer(self, layer_class, fp8_utils)

    return __init__


def _upstream_parts() -> tuple[type, ModuleType]:
    """Return the class of the fused output layer, and the module that knows whether MXFP8 is used for that layer."""
    layer_class: type = getattr(importlib.import_module(feature.LINEAR), feature.LAYER)
    return layer_class, importlib.import_module("megatron.core.fp8_utils")


def _forward(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def forward(
        self: Any,
        input_ids: Any,
        position_ids: Any,
        attention_mask: Any,
        decoder_input: Any = None,
        labels: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        asked = self.post_process and (labels is not None or self.mtp_process)
        seen = _view(self, labels) if asked and getattr(self, _FUSED, False) else self
        return original(seen, input_ids, position_ids, attention_mask, decoder_input, labels, *args, **kwargs)

    return forward


class _OutputLayer:
    """Stub of an output layer that records its arguments."""

    sequence_parallel = False

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def __call__(self, hidden: Any, **asked: Any) -> Any:
        self.asked = {"hidden": hidden, **asked}
        loss = hidden.sum(dim=-1).transpose(0, 1)
        return loss if asked.get("output_cross_entropy_loss") else (hidden, None)


class _Quiet(SimpleNamespace):
    """Namespace whose missing attributes are False."""

    def __getattr__(self, name: str) -> Any:
        return False


def _try(module: ModuleType) -> tuple[str | None, bool]:
    """Run the model's own forward, with a stack that does nothing.

    Returns:
        The error that upstream ends with, and whether the output layer was called for the loss of scaled hidden states
        and its result was returned.
    """
    import torch

    hidden = torch.ones(3, 2, 4, device="cpu")
    labels = torch.zeros(2, 3, dtype=torch.int64, device="cpu")
    layer = _OutputLayer()
    model = _Quiet(
        config=_config(),
        training=True,
        pre_process=True,
        post_process=True,
        output_layer=layer,
        embedding=lambda **_: hidden,
        decoder=lambda hidden_states, **_: hidden_states,
        position_embedding_type="none",
        **{_FUSED: True},
    )
    for name in ("_scale_logits", "compute_language_model_loss"):
        setattr(model, name, getattr(module.HybridModel, name).__get__(model))
    try:
        loss = module.HybridModel.forward(model, labels, labels, None, labels=labels)
    except UnboundLocalError as error:
        return f"UnboundLocalError: {error}", False
    return None, layer.asked.get("labels") is labels and loss.tolist() == [[8.0] * 3] * 2


def _witness(module: ModuleType) -> Observation:
    error, _ = _try(module)
    return Observation(broken=error is not None, seen=f"with linear the loss ends in {error or 'no error'}")


def _self_test(module: ModuleType) -> Observation:
    """Run the model again, and then check the proxy's assumptions about the layer and the scale, with made-up numbers."""
    error, right = _try(module)
    layer_class, fp8_utils = _upstream_parts()
    (plain,) = layer_class.__bases__
    layer: Any = object.__new__(plain)
    _fuse_output_layer(SimpleNamespace(config=_config(), output_layer=layer), layer_class, fp8_utils)
    answers = {
        f"the output layer is not asked for the loss: {error}": right,
        f"the output layer is a {type(layer).__name__}": type(layer) is layer_class,
        f"{feature.LAYER} does not give the loss of the scaled logits for each label, as (batch, sequence)": (
            _answers_as_logits_would(module.HybridModel, layer_class)
        ),
        "logits are not scaled by mup_output_mult under MuP": _scales(module.HybridModel),
    }
    wrong = [seen for seen, fine in answers.items() if not fine]
    return Observation(broken=bool(wrong), seen="; ".join(wrong) or f"a {feature.LAYER} is asked for the loss")


def _scales(model_class: Any) -> bool:
    """Return whether MuP multiplies logits by the same factor as the proxy multiplies hidden states."""
    config = _config()
    scaled = model_class._scale_logits(SimpleNamespace(config=config), 3.0)  # noqa: SLF001
    return bool(scaled == 3.0 * config.mup_output_mult)


def _config() -> _Quiet:
    return _Quiet(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="linear", use_mup=True, mup_output_mult=2.0)


def _answers_as_logits_would(model_class: Any, layer_class: Any) -> bool:
    """Return whether the loss through the view and the layer is that of upstream's scaled logits, label by label.

    The layer's own methods run, with hidden states that are scaled for MuP, and the code that they call, down to the entry of a
    device. There the portable entry computes on the CPU. They run with other globals, so no object of other threads
    is changed and no device is queried; see `rehearsal`.
    """
    import torch

    from megacpp_overlays.kernels.linear_cross_entropy.rehearsal import PUBLIC, Rehearsal

    method = layer_class._compute_linear_and_cross_entropy_loss  # noqa: SLF001 - the one that asks for the losses
    run = Rehearsal(method.__globals__[PUBLIC], dispatch.GETTER, dispatch.FUNCTION)
    made_up = {**method.__globals__, PUBLIC: run.loss}
    computes = FunctionType(method.__code__, made_up, method.__name__, method.__defaults__, method.__closure__)
    layer = _Quiet(config=_config(), tp_group=None)
    setattr(layer, method.__name__, computes.__get__(layer))
    labels = torch.arange(6, device="cpu").view(2, 3)
    # Eighths and sixteenths, so that products are exact and only the logarithm rounds.
    hidden = (torch.arange(24.0, dtype=torch.float32, device="cpu").view(3, 2, 4) - 11) / 8
    weight = (torch.arange(24.0, dtype=torch.float32, device="cpu").view(6, 4).flip(0) - 5) / 16
    config = _config()
    model = _Quiet(config=config, output_layer=functools.partial(layer_class.forward, layer))
    loss, _ = _view(model, labels).output_layer(hidden, weight=weight)
    logits = model_class._scale_logits(_Quiet(config=config), hidden @ weight.t())  # noqa: SLF001
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="none")
    return bool(loss.shape == labels.shape and torch.allclose(loss, expected.view(3, 2).t(), rtol=1e-4, atol=1e-5))


OVERLAY = Overlay(
    id="hybrid-linear-ce",
    pack=11,
    title="The hybrid model's output layer and MTP head compute the fused linear cross entropy, as the GPT model's do",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={
        feature.PLAIN_OUTPUT_LAYER: (
            Replacement(symbol="HybridModel.__init__", make=_constructor),
            Replacement(symbol="HybridModel.forward", make=_forward),
        ),
    },
    unsupported={},
    witness=_witness,
    self_test=_self_test,
    opt_in=False,
    symptoms=(
        "UnboundLocalError in a hybrid model at the first step",
        "TypeError in MTP with cross_entropy_fusion_impl linear",
    ),
    concerns="hybrid and linear_loss",
    breaks=(
        'a hybrid model with cross_entropy_fusion_impl="linear" ends in UnboundLocalError at the first step, and with '
        "MTP in a TypeError"
    ),
    brief="the fused loss of hybrid models",
    until="HybridModel asks for it as GPTModel does",
    retire_when="HybridModel of every supported Megatron makes a LinearCrossEntropyModule and asks it for the loss",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=3226, state="merged to dev 2026-02-04, wired both models"),
        Thread(repository="NVIDIA/Megatron-LM", number=3207, state="merged to main 2026-02-04, MTP for hybrid models"),
        Thread(repository="NVIDIA/Megatron-LM", number=3574, state="merged to dev 2026-02-26, main taken in; lost it"),
        Thread(repository="NVIDIA/Megatron-LM", number=4099, state="merged 2026-04-19 to main, renames the model"),
    ),
    last_validated=(
        "2026-11-21, H200, torch 2.11.0+cu130: dev 945f6a8f05db trained with Mamba layers and MTP; x86-64 without GPU: dev "
        "d48bd6be0a trained on the CPU, alone and on two ranks; its "
        "history since 2026-04-22, releases 0.14.0 to 0.19.2 and main d98e8a64dd read"
    ),
)
