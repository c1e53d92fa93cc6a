"""Initialization of `linear_fc2` of experts in Megatron's latent MoE with `init_method`: off unless its variable is `on`.

With `moe_latent_size` experts write a latent, and `fc2_latent_proj` of the layer projects the latent to the residual. This projection is
initialized by `output_layer_init_method`, whose standard deviation is divided by the root of twice the number of layers so that the
residual does not grow with them. The experts' own `linear_fc2` is initialized by it as well, so the output of routed experts is scaled
down twice.

The constructor runs unchanged. The builder of `linear_fc2` gets `init_method` where the layer is an expert of a latent MoE, as in
upstream's open pull request, and its own arguments everywhere else. Both methods draw as many random numbers, so all other weights are
the same.

The overlay is off by default because models were tuned, and trained, with upstream's initialization.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6278, https://github.com/NVIDIA/Megatron-LM/issues/5225
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import latent_moe_fc2_init as feature
from megacpp_overlays.model import Finding, Observation, Overlay, Replacement, Target, Thread
from megacpp_overlays.source.trees import SourceTree


def _make_single(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def __init__(  # noqa: N807 - it becomes a constructor
        self: Any, config: Any, submodules: Any, is_expert: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        original(self, config, _inner(submodules, config) if is_expert else submodules, is_expert, *args, **kwargs)

    return __init__


def _make_grouped(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def __init__(  # noqa: N807 - it becomes a constructor
        self: Any, num_local_experts: int, config: Any, submodules: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(self, num_local_experts, config, _inner(submodules, config), *args, **kwargs)

    return __init__


def _inner(submodules: Any, config: Any) -> Any:
    """Return the builders of the parts; where experts write a latent, `linear_fc2` gets `init_method`."""
    if config.moe_latent_size is None:
        return submodules
    build = submodules.linear_fc2

    def linear_fc2(*args: Any, **kwargs: Any) -> Any:
        return build(*args, **{**kwargs, "init_method": config.init_method})

    ours = copy.copy(submodules)
    ours.linear_fc2 = linear_fc2
    return ours


_INNER, _OUTPUT = "inner", "output"


def _observe(make: Callable[..., Any]) -> Callable[[ModuleType], Observation]:
    def observe(module: ModuleType) -> Observation:
        """Build experts of a latent MoE and other MLPs with stubs that record the initialization of projections."""
        found = {each: _begins(make, module, *each) for each in ((2, True), (None, True), (2, False))}
        seen = ", ".join(map(str, found[2, True]))
        return Observation(
            broken=found
            != {
                (2, True): [_INNER, _INNER],
                (None, True): [_INNER, _OUTPUT],
                (2, False): [_INNER, _INNER if make is _grouped else _OUTPUT],
            },
            seen=f"projections of an expert that writes a latent begin with the methods for: {seen}",
        )

    return observe


def _begins(make: Callable[..., Any], module: ModuleType, latent: int | None, is_expert: bool) -> list[Any]:
    """Return the initialization methods that both projections get.

    Args:
        make: calls the constructor.
        module: the target.
        latent: width of the latent, or None.
        is_expert: value of the constructor's argument of this name.
    """
    found: list[Any] = []

    def projection(*_: Any, init_method: Any, **__: Any) -> None:
        found.append(init_method)

    config = _LayerConfig(
        hidden_size=4,
        ffn_hidden_size=4,
        moe_ffn_hidden_size=4,
        moe_latent_size=latent,
        init_method=_INNER,
        output_layer_init_method=_OUTPUT,
    )
    make(module, config, _Builders(linear_fc1=projection, linear_fc2=projection, activation_func=None), is_expert)
    return found


def _single(module: ModuleType, config: Any, submodules: Any, is_expert: bool) -> None:
    module.MLP(config, submodules, is_expert, ffn_hidden_size=4, tp_group=SimpleNamespace(size=lambda: 1))


def _grouped(module: ModuleType, config: Any, submodules: Any, _is_expert: bool) -> None:
    module.TEGroupedMLP(1, config, submodules, pg_collection=SimpleNamespace(ep=None, expt_tp=None))


class _Builders(SimpleNamespace):
    """Builders of the parts of an expert."""


class _LayerConfig(SimpleNamespace):
    """Config whose missing attributes are None."""

    def __getattr__(self, name: str) -> None:
        return None


def _part(
    target: Target, probe: Callable[[SourceTree], Finding], make: Callable[..., Any], layer: Callable[..., Any]
) -> Overlay:
    return Overlay(
        id="latent-moe-fc2-init",
        pack=33,
        title="let the second projection of experts that write a latent begin as an inner one",
        target=target,
        probe=probe,
        replacements={feature.SCALED: (Replacement(symbol=target.symbol, make=make),)},
        unsupported={
            feature.SCALED_BY_SPECIFICATION: "megatron-core 0.16 makes experts of specifications, which have no argument to change: take "
            "0.17.0 or newer, or multiply linear_fc2 of routed experts by the root of twice the number of layers"
        },
        witness=_observe(layer),
        self_test=_observe(layer),
        opt_in=True,
        symptoms=(
            "routed experts of a latent MoE learn slowly at first",
            "output of experts is too small at initialization",
        ),
        concerns="experts and latent_experts",
        breaks="routed experts of a latent MoE begin as if their latent were the residual, so their output is scaled down twice",
        retire_when="linear_fc2 of an expert that writes a latent begins with init_method",
        brief="how latent MoE experts begin",
        until="they begin with init_method",
        threads=(
            Thread(repository="NVIDIA/Megatron-LM", number=6278, state="open 2026-08-05: a repair"),
            Thread(repository="NVIDIA/Megatron-LM", number=5225, state="open 2026-06-09: asks whether it is meant"),
        ),
        last_validated="2026-11-23, x86-64 without GPU, torch 2.11.0: megatron-core 0.17.1, 0.18.2 and 0.19.2, main d98e8a64dd and dev "
        "d48bd6be0a; 0.16.0 to 0.19.2 read",
    )


PARTS = (
    _part(feature.SINGLE, feature.probe_single, _make_single, _single),
    _part(feature.GROUPED, feature.probe_grouped, _make_grouped, _grouped),
)
