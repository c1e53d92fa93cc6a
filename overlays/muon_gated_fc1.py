"""Separate orthogonalization in Megatron's Muon of a gate and its values, and of keys and values of multi-latent attention: off unless its variable is `on`.

Megatron keeps both matrices in one parameter, so that one product computes them. Muon splits those of grouped queries, keys and values by shapes that each parameter carries. Parameters of two matrices get such shapes
here before upstream makes the optimizer, and upstream's code splits them. Where splits of queries, keys and values are switched off, these are off, too.

The overlay is off by default because the step of half a matrix has another length, and learning rates were tuned for upstream's.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6688
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import muon_gated_fc1 as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread

_MUON = ("muon", "adaptive_muon")
_SHAPES = "qkv_split_shapes"
"""An attribute of a parameter: numbers of rows of each matrix, which take turns."""
_WEIGHT = re.compile(r"weight(\d*)")
"""The name of a weight; grouped linear layers number theirs."""


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def _create_emerging_optimizer(
        config: Any, param_groups: Any, eopt_name: str, model_chunks: Sequence[Any], pg_collection: Any
    ) -> Any:
        halves = list(_halves(model_chunks)) if eopt_name in _MUON else []
        for parameter, rows in halves:
            parameter.is_qkv = True
            setattr(parameter, _SHAPES, list(rows))
        optimizer, initialise = original(config, param_groups, eopt_name, model_chunks, pg_collection)
        if halves and not optimizer.split_qkv:
            optimizer.split_qkv, optimizer.is_qkv_fn = True, _is_of_two
        return optimizer, initialise

    return _create_emerging_optimizer


def _is_of_two(parameter: Any) -> bool:
    return len(getattr(parameter, _SHAPES, None) or ()) == 2


def _halves(models: Sequence[Any]) -> Iterator[tuple[Any, tuple[int, int]]]:
    """Yield each parameter of two matrices, with the rows of each by which they take turns."""
    for module in (each for model in models for each in model.modules()):
        config: Any = getattr(module, "config", None)
        if getattr(config, "gated_linear_unit", False):
            for parameter, is_numbered in _weights(module, "linear_fc1"):
                rows = (is_numbered and _interleaved(module)) or len(parameter) // 2
                yield parameter, (rows, rows)
        if hasattr(config, "qk_head_dim"):
            for parameter, _ in _weights(module, "linear_kv_up_proj"):
                yield parameter, (config.qk_head_dim, config.v_head_dim)


def _weights(module: Any, layer: str) -> Iterator[tuple[Any, bool]]:
    """Yield each weight of a linear layer that is learned and that this rank has all rows of, and whether it is one of a grouped layer."""
    found = getattr(module, layer, None)
    for name, parameter in found.named_parameters(recurse=False) if found is not None else ():
        match = _WEIGHT.fullmatch(name)
        rows_are_elsewhere = getattr(parameter, "is_gtp_weight_remat", False)
        if match and parameter.requires_grad and parameter.ndim == 2 and not rows_are_elsewhere:
            yield parameter, bool(match[1])


def _interleaved(module: Any) -> int | None:
    """Return in blocks of how many rows a grouped layer has gates and values in turn, None where all gates come first."""
    of = "moe_shared_expert" if type(module).__name__.startswith("SharedExpert") else "moe_mlp"
    rows: int | None = getattr(module.config, f"{of}_glu_interleave_size", None)
    return rows


def observe(module: ModuleType) -> Observation:
    """Let Muon orthogonalize a gradient of four rows of a gated layer, of which two are a hundred times as large."""
    if not module.HAVE_EMERGING_OPTIMIZERS:
        return Observation(broken=False, seen="there is no Muon without the package emerging-optimizers")
    import torch

    with torch.inference_mode(False), torch.no_grad():
        model = _gated_model()
        weight = model.linear_fc1.weight
        settings = SimpleNamespace(muon_fp32_matmul_prec="highest")
        create = getattr(module, feature.TARGET.symbol)
        optimizer = create(settings, [weight], "muon", [model], None)[0]
        gradient = torch.tensor([[100.0, 0.0], [20.0, 100.0], [0.2, 1.0], [1.0, 0.0]], device="cpu")
        alone = torch.nn.Parameter(torch.zeros((2, 2), device="cpu"))
        right = torch.cat([optimizer.orthogonalize(alone, each) for each in gradient.split(2)])
        found = optimizer.orthogonalize(weight, gradient)
    apart = float((found - right).norm() / right.norm())
    return Observation(
        broken=apart > 0.01, seen=f"a step of a gate and its values is {apart:.1e} off those of two matrices"
    )


def _gated_model() -> Any:
    """Return a gated layer as a model, of two values of two inputs."""
    import torch

    model = torch.nn.Module()
    model.config = SimpleNamespace(gated_linear_unit=True, num_attention_heads=1, num_query_groups=1, kv_channels=2)
    model.linear_fc1 = torch.nn.Linear(2, 4, bias=False, device="cpu")
    return model


OVERLAY = Overlay(
    id="muon-gated-fc1",
    pack=69,
    title="orthogonalize a gate and its values, and keys and values of multi-latent attention, as matrices of their own in Muon",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.AS_ONE: (Replacement(symbol=feature.TARGET.symbol, make=_make),)},
    unsupported={
        feature.NO_SPLITS_OF_PARAMETERS: "take megatron-core 0.19.0 or newer: here a parameter carries no shapes, and with bfloat16 weights Muon does not even take queries, keys and values apart",
    },
    witness=None,  # upstream may take them apart where it marks queries, keys and values
    self_test=observe,
    opt_in=True,
    symptoms=(
        "Muon updates of SwiGLU's `linear_fc1` are dominated by the gate or by the up projection",
        "Muon orthogonalizes `linear_fc1` or `linear_kv_up_proj` as one matrix",
    ),
    concerns="muon",
    breaks="Muon orthogonalizes a gate and its values, and keys and values of multi-latent attention, as one matrix: steps are about half off those of two",
    retire_when="Muon takes linear_fc1 of gated MLPs and linear_kv_up_proj apart",
    brief="Muon's steps of gated MLPs",
    until="Muon takes linear_fc1 apart",
    threads=(
        Thread(
            repository="NVIDIA/Megatron-LM",
            number=6688,
            state="open when last seen 2026-09-22: takes gated linear_fc1 apart",
        ),
        Thread(repository="NVIDIA/Megatron-LM", number=7077, state="closed 2026-09-04 as a duplicate of 6688"),
    ),
    last_validated="2026-11-30, x86-64 without GPU, torch 2.11.0, emerging-optimizers 0.3.0: megatron-core 0.19.2, main d98e8a64dd and dev d48bd6be0a",
)
