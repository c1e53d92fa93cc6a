"""Let Transformer Engine's FusedAdam step from the weights that were loaded into its model.

With `use_precision_aware_optimizer` main weights are state of FusedAdam, and `reload_model_params` copies none. After it, main weights that are there are set to those of the model, or of the state dict that the caller passes. A main weight that FusedAdam makes in its first step is a copy of the weight by then. Moments stay as they are, and all of it can be done twice.

Source: https://github.com/NovaSky-AI/SkyRL/pull/2149
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import precision_aware_reload as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime.bare_instances import bare

_MAIN, _SETTER = "master_param", "set_scaled_state"
"""A main weight in the state of FusedAdam, and FusedAdam's method that sets one."""


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    import torch

    def reload_model_params(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        state = getattr(self.optimizer, "state", None)
        if not state or not hasattr(self.optimizer, _SETTER) or not _keeps_main_weights(self):
            return
        state_dict = args[0] if args else kwargs.get("state_dict")
        loaded = {} if state_dict is None else self._build_model_param_to_state_dict_param_map(state_dict)
        with torch.no_grad():
            for weights, shards in zip(self.model_float16_groups, self.shard_float16_groups, strict=True):
                for weight, shard in zip(weights, shards, strict=True):
                    if shard is not None and _MAIN in state.get(shard, ()):
                        part = self._get_model_param_range_map(weight)["param"]
                        _set(self.optimizer, shard, _flat(loaded.get(weight, weight))[part.start : part.end])

    return reload_model_params


def _keeps_main_weights(whole: Any) -> bool:
    """Return whether a distributed optimizer gives weights of the model to one within, which keeps main weights."""
    older = getattr(whole.config, "use_precision_aware_optimizer", False)  # of 0.11 and 0.12
    is_on = getattr(whole.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", older)
    return bool(is_on) and hasattr(whole, "shard_float16_groups")


def _flat(weight: Any) -> Any:
    """Return a weight as one row; an 8-bit weight is converted to its values, since its bytes are encoded."""
    is_plain = type(weight).__name__ in ("Tensor", "Parameter")
    return (weight if is_plain else weight.float()).reshape(-1)


def _set(adam: Any, shard: Any, values: Any) -> None:
    """Set a main weight of FusedAdam, which may be stored as the 16 bits that a bfloat16 weight lacks."""
    import torch

    main = adam.state[shard][_MAIN]
    if main.dtype == torch.int16:
        bits = values.float().contiguous().view(torch.int32)
        lower = (bits & 0xFFFF).to(torch.int16)
        upper = (bits >> 16) + (lower < 0)  # as FusedAdam rounds: one more where the lower half has its highest bit
        weight = shard.detach().reshape(-1).view(torch.int16).to(torch.int32)
        main.copy_(torch.where((upper & 0xFFFF) == (weight & 0xFFFF), lower, 0).view_as(main))
    else:
        adam.set_scaled_state(shard, _MAIN, values.float().view_as(main))


def observe(module: ModuleType) -> Observation:
    """Load a weight into a model whose optimizer keeps a main weight."""
    import torch

    with torch.inference_mode(False):
        weight, main = (torch.full((1,), value, device="cpu") for value in (1.0, 7.0))
        state = {weight: {_MAIN: main}}
        adam = SimpleNamespace(state=state, **{_SETTER: lambda each, name, value: state[each][name].copy_(value)})
        upstream = module.MixedPrecisionOptimizer
        whole = bare(
            type("Whole", (upstream,), dict.fromkeys(upstream.__abstractmethods__)),
            optimizer=adam,
            is_stub_optimizer=True,  # it has no other parameters
            config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=True),
            model_float16_groups=[[weight]],
            shard_float16_groups=[[weight]],
            _get_model_param_range_map=lambda _: {"param": SimpleNamespace(start=0, end=1)},
        )
        whole.reload_model_params()
        found = float(main)
    return Observation(broken=found != 1.0, seen=f"of a loaded weight of 1 the main weight is {found:g}")


OVERLAY = Overlay(
    id="precision-aware-reload",
    pack=70,
    title="let a precision-aware optimizer step from the weights that were loaded into its model",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.STALE: (Replacement(symbol=feature.TARGET.symbol, make=_make),)},
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "weights that were loaded during a run are lost in the next step with `use_precision_aware_optimizer`",
        "the policy of a reinforcement learning run goes back to old weights after a weight sync with `use_precision_aware_optimizer`",
    ),
    concerns="precision_aware",
    breaks="a precision-aware optimizer that has taken a step goes back to the weights before when others are loaded without its state, "
    "unless it keeps main weights as remainders of bfloat16 ones",
    brief="weights loaded into precision-aware runs",
    until="main weights of FusedAdam follow",
    retire_when="DistributedOptimizer sets main weights of a precision-aware optimizer where it copies those of a model",
    threads=(
        Thread(
            repository="NovaSky-AI/SkyRL",
            number=2149,
            state="open when last seen 2026-09-22: sets them itself",
        ),
    ),
    last_validated="2026-11-30, H200 with Transformer Engine 2.20.2, torch 2.11.0: megatron-core 0.19.2; x86-64 without GPU: 0.16.0, and 0.13.0 with float16 main weights; 0.11.0 to 0.19.2, main d98e8a64dd and dev d48bd6be0a read",
)
