"""What Megatron saves to recompute layers, on explicit tensor parallel groups: is it put together from its own pieces?

As in `reproduce.py`, four ranks are forked, layers are given ranks 0 and 2, and 1 and 3, the default groups are others, and each rank is compared
with what one rank does. Here a real `TransformerBlock` recomputes the first of its two layers through `megatron.core.recompute`, and a real
`MultiTokenPredictionLayer` recomputes itself. Both share out what they save.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent, beside

PACK = beside(__file__)
RECOMPUTE = "megatron.core.recompute"
PREDICTION = "megatron.core.transformer.multi_token_prediction"
SHARED_OUT = {"recompute_granularity": "full", "recompute_num_layers": 1, "distribute_saved_activations": True}


def _recompute() -> Behaviour:
    PACK._imported(RECOMPUTE)

    def build(groups: dict[str, Any]) -> Any:
        import torch
        from megatron.core.transformer.spec_utils import ModuleSpec
        from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
        from megatron.core.transformer.transformer_config import TransformerConfig

        class Inner(torch.nn.Module):  # type: ignore[misc]
            def __init__(self, layer_number: int, **_: Any) -> None:
                super().__init__()
                self.layer_number, self.weight = layer_number, torch.nn.Parameter(torch.ones(PACK.HIDDEN, PACK.HIDDEN))

            def forward(self, hidden_states: Any, **_: Any) -> Any:
                return (hidden_states @ self.weight).tanh(), None

        class Layer(torch.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                layers = {**PACK._common(groups), "num_layers": 2}
                config = TransformerConfig(**layers, **SHARED_OUT, recompute_method="block")
                parts = TransformerBlockSubmodules(layer_specs=[ModuleSpec(module=Inner)] * 2, layer_norm=None)
                self.block = TransformerBlock(config, parts, post_layer_norm=False, **groups)

            def forward(self, hidden: Any) -> Any:
                # What is shared out is cut where it lies, so it must not be the input whose gradient is asked for.
                return self.block(hidden_states=hidden * 1.0, attention_mask=None)

        return Layer()

    return _measured(build, PACK.BLOCK)


def _predictions() -> Behaviour:
    module = PACK._imported(PREDICTION)
    layer = module.MultiTokenPredictionLayer
    if "self.tp_group" not in inspect.getsource(layer):
        raise TargetAbsent("prediction layers have no group of their own")
    recomputed = inspect.signature(layer._checkpointed_forward).parameters
    if "hidden_states" in recomputed and "padding_mask" not in recomputed:
        raise TargetAbsent(
            "to recompute a prediction layer ends in an error: it is given a padding mask that it does not take"
        )

    _demand_inference_layers()

    def build(groups: dict[str, Any]) -> Any:
        import torch
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear
        from megatron.core.transformer.transformer_config import TransformerConfig

        class Norm(torch.nn.Module):  # type: ignore[misc]
            def __init__(self, **_: Any) -> None:
                super().__init__()

            def forward(self, values: Any) -> Any:
                return torch.nn.functional.layer_norm(values, values.shape[-1:])

        class Inner(torch.nn.Module):  # type: ignore[misc]
            def __init__(self, **_: Any) -> None:
                super().__init__()
                self.layer_number = 1

            def forward(self, hidden_states: Any, **_: Any) -> Any:
                return (2 * hidden_states).tanh(), None

        class Layer(torch.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                options = {**PACK._common(groups), **SHARED_OUT, "recompute_method": "uniform", "mtp_num_layers": 1}
                kind = module.MultiTokenPredictionLayerSubmodules
                inner = "mtp_model_layer" if "mtp_model_layer" in kind.__dataclass_fields__ else "transformer_layer"
                parts = kind(enorm=Norm, hnorm=Norm, eh_proj=ColumnParallelLinear, layer_norm=Norm, **{inner: Inner})
                # By this name its only weight, of the projection, is known to be cut by columns.
                self.linear = layer(TransformerConfig(**options), parts, layer_number=1, **groups)

            def forward(self, hidden: Any) -> Any:
                tokens = torch.arange(PACK.TOKENS)[None]
                return self.linear(
                    input_ids=tokens,
                    position_ids=tokens,
                    hidden_states=hidden * 1.0,
                    attention_mask=None,
                    embedding=lambda input_ids, position_ids: hidden.detach() * 0.5,
                )[0]

        return Layer()

    return _measured(build, PREDICTION)


def _demand_inference_layers() -> None:
    """Check that a prediction layer can be made here: on main it asks its projection whether it is a layer of Transformer Engine.

    Raises:
        Blocked: it cannot, for want of Transformer Engine.
    """
    name = "megatron.core.tensor_parallel.inference_layers"
    layers: Any = importlib.import_module(name) if importlib.util.find_spec(name) else None
    if getattr(layers, "is_inference_column_parallel_linear", None) and not isinstance(
        layers.InferenceColumnParallelLinear, type
    ):
        raise Blocked("this upstream makes prediction layers with Transformer Engine alone, which is not installed")


def _measured(build: Any, module: str) -> Behaviour:
    found: Behaviour = PACK._run(build, module, is_cut=False)
    return found


def _case(name: str, run: Any, module: str) -> Case:
    return Case(name=name, overlay="explicit-tp-groups", device="cpu", versions=("torch",), run=run, targets=(module,))


CASES = (
    _case("recompute-cpu", _recompute, RECOMPUTE),
    _case("predictions-cpu", _predictions, PREDICTION),
)
