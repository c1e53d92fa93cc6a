"""Run in a fresh interpreter: routed experts of Megatron as they begin, with the overlay and without it; JSON.

    python tests/support/latent_experts.py

The release is the one that is first on the path. `SequentialMLP` makes real experts of Megatron's own projections, and `TEGroupedMLP` of plain
tensors, since Transformer Engine's need a GPU. All draw from the same seed.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from typing import Any

import megacpp_overlays

# isort: split
import torch

ID = "latent-moe-fc2-init"
HIDDEN, LATENT, LAYERS, COUNT = 8, 4, 8, 2
KINDS = ("sequential", "grouped")


class Projection(torch.nn.Module):
    """What of Transformer Engine's grouped projection is about how it begins: a weight for each expert."""

    def __init__(self, count: int, width: int, wide: int, *, init_method: Any, **_: Any) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.empty(wide, width) for _ in range(count))
        for each in self.weights:
            init_method(each)


def experts(kind: str, latent: int | None) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    module = importlib.import_module("megatron.core.transformer.moe.experts")
    projections = importlib.import_module("megatron.core.tensor_parallel")
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=COUNT,
        moe_ffn_hidden_size=HIDDEN,
        moe_latent_size=latent,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    torch.manual_seed(33)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if kind == "grouped":
        parts = module.GroupedMLPSubmodules(linear_fc1=Projection, linear_fc2=Projection)
        return module.TEGroupedMLP(COUNT, config, parts, pg_collection=groups), parts
    parts = MLPSubmodules(linear_fc1=projections.ColumnParallelLinear, linear_fc2=projections.RowParallelLinear)
    return module.SequentialMLP(COUNT, config, parts, pg_collection=groups), parts


def facts() -> dict[str, Any]:
    """Return weights by kind of experts, latent and projection, and whether what they were made of is as it was."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        for latent in (LATENT, None):
            made, parts = experts(kind, latent)
            weights = {name: each.flatten().tolist() for name, each in made.named_parameters()}
            left_alone = parts.linear_fc2.__name__ in {"RowParallelLinear", "Projection"}
            found[f"{kind}, {latent}"] = {"weights": weights, "left alone": left_alone}
    return found


def main() -> None:
    """Answer on standard output."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        importlib.import_module("megatron.core.parallel_state").initialize_model_parallel()
    importlib.import_module("megatron.core.transformer.moe.experts")
    decisions = [each.decision.value for each in megacpp_overlays.audit().records if each.overlay.id == ID]
    answer: dict[str, Any] = {"decisions": decisions, "on": facts()}
    megacpp_overlays.undo()
    sys.stdout.write(json.dumps({**answer, "off": facts()}))


if __name__ == "__main__":
    main()
