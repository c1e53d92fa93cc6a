"""Megatron's latent MoE: how large do weights of routed experts begin, and what do they add to the residual?

Real experts of a model of 2 and of 32 layers are made, and the standard deviation of their second projection is measured. In
`sequential-cpu` each is a layer of Megatron's own projections, and what they make of random latents goes through a projection that
begins as the layer's `fc2_latent_proj`: what is added to the residual is to fall by the root of 16, so that the sum over
layers is the same. In `grouped-cpu` Transformer Engine would compute them together; its projection is a plain tensor here.
"""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent

SINGLE = "megatron.core.transformer.mlp"
EXPERTS = "megatron.core.transformer.moe.experts"
PROJECTIONS = "megatron.core.tensor_parallel"
LAYERS = (2, 32)
HIDDEN, LATENT, TOKENS, COUNT = 256, 128, 64, 2
DEVIATION = 0.02
ENOUGH = 0.03
"""Relative: of so many weights the deviation is known to less than a hundredth."""


def _sequential() -> Behaviour:
    return _in_a_process(_made_one_by_one)


def _grouped() -> Behaviour:
    return _in_a_process(_made_together)


def _in_a_process(make: Callable[[Any], Any]) -> Behaviour:
    """Run in a fork, which has process groups of its own."""
    import torch  # noqa: F401 - once, before the fork
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not hasattr(TransformerConfig, "moe_latent_size"):
        raise TargetAbsent("there is no latent MoE")
    importlib.import_module(EXPERTS)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_measured, args=(make, Path(folder)))
        process.start()
        process.join()
        found = json.loads(Path(folder, "found").read_text())
    shallow, deep = found
    words = [f"{each['weight']:.5f} of {layers} layers" for layers, each in zip(LAYERS, found, strict=True)]
    seen = f"the deviation of linear_fc2 is {' and '.join(words)}, and that of other inner projections is {DEVIATION}"
    if shallow["added"] is not None:
        falls = shallow["added"] / deep["added"]
        seen += f"; what is added to the residual falls by {falls:.2f}, and is to fall by {math.sqrt(LAYERS[1] / LAYERS[0]):.2f}"
    broken = any(abs(each["weight"] / DEVIATION - 1) > ENOUGH for each in found)
    return Behaviour(broken=broken, seen=seen)


def _measured(make: Callable[[Any], Any], folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    importlib.import_module("megatron.core.parallel_state").initialize_model_parallel()
    found = []
    for layers in LAYERS:
        torch.manual_seed(33)
        config = _config(layers)
        experts = make(config)
        weights = [each for name, each in experts.named_parameters() if "linear_fc2" in name]
        found.append({"weight": float(torch.stack(weights).std()), "added": _added(experts, config)})
    (folder / "found").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def _added(experts: Any, config: Any) -> float | None:
    """Return the deviation of what experts add to the residual; None where they cannot be run here."""
    import torch

    if not hasattr(experts, "local_experts"):
        return None
    projection = torch.empty(HIDDEN, LATENT)
    config.output_layer_init_method(projection)
    tokens = torch.full((COUNT,), TOKENS // COUNT)
    with torch.no_grad():
        latents, _ = experts(torch.randn(TOKENS, LATENT), tokens, torch.ones(TOKENS))
        return float((latents @ projection.T).std())


def _made_one_by_one(config: Any) -> Any:
    module, projections = importlib.import_module(EXPERTS), importlib.import_module(PROJECTIONS)
    parts = importlib.import_module(SINGLE).MLPSubmodules(
        linear_fc1=projections.ColumnParallelLinear, linear_fc2=projections.RowParallelLinear
    )
    return module.SequentialMLP(COUNT, config, parts, pg_collection=_groups())


def _made_together(config: Any) -> Any:
    import torch

    class Projection(torch.nn.Module):  # type: ignore[misc]
        """What of Transformer Engine's grouped projection is about how it begins: a weight for each expert."""

        def __init__(self, count: int, width: int, wide: int, *, init_method: Any, **_: Any) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList(torch.empty(wide, width) for _ in range(count))
            for each in self.weights:
                init_method(each)

    module = importlib.import_module(EXPERTS)
    parts = module.GroupedMLPSubmodules(linear_fc1=Projection, linear_fc2=Projection)
    return module.TEGroupedMLP(COUNT, config, parts, pg_collection=_groups())


def _groups() -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


def _config(layers: int) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=layers,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=COUNT,
        moe_ffn_hidden_size=HIDDEN,
        moe_latent_size=LATENT,
        init_method_std=DEVIATION,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )


def _case(name: str, run: Callable[[], Behaviour], target: str) -> Case:
    return Case(name=name, overlay="latent-moe-fc2-init", device="cpu", versions=("torch",), run=run, targets=(target,))


CASES = (_case("sequential-cpu", _sequential, SINGLE), _case("grouped-cpu", _grouped, EXPERTS))
