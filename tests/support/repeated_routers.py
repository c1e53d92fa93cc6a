"""Run in a fresh interpreter: auxiliary losses of MoE layers for multi-token prediction, with overlays and without; JSON.

    python tests/support/repeated_routers.py

The release is the one that is first on the path. Real routers route the same tokens once for each prediction, and their auxiliary loss is the
only source of gradients. A hybrid stack makes the routers where the release has one; otherwise they get their purpose as an argument.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import tempfile
from types import ModuleType, SimpleNamespace
from typing import Any

import megacpp_overlays

# isort: split
import torch
from forked_ranks import DEVICE, ON_CPU

STACK = "megatron.core.models.hybrid.hybrid_block"
ROUTER = "megatron.core.transformer.moe.router"
IDS = ("hybrid-mtp-aux-loss", "mtp-z-loss")
LAYERS, TOKENS, HIDDEN = 3, 6, 8


def modules() -> tuple[ModuleType | None, ModuleType]:
    try:
        return importlib.import_module(STACK), importlib.import_module(ROUTER)
    except ModuleNotFoundError:
        return None, importlib.import_module(ROUTER)


def groups() -> Any:
    """Return the groups of the one rank that there is."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


def routers(config: Any, places: int, *, predicts: bool, stacked: bool) -> list[Any]:
    """Return the routers of so many MoE layers."""
    stack, router = modules()

    class Layer(torch.nn.Module):
        def __init__(self, config: Any, layer_number: int, *, is_mtp_layer: bool = False, **_: Any) -> None:
            super().__init__()
            self.router = router.TopKRouter(config, groups(), is_mtp_layer=is_mtp_layer)
            self.router.set_layer_number(layer_number)

    if not stacked:
        return [Layer(config, number + 1, is_mtp_layer=predicts).router for number in range(places)]
    assert stack is not None
    from megatron.core.transformer.spec_utils import ModuleSpec

    made = stack.HybridStack(
        config=config,
        submodules=SimpleNamespace(moe_layer=ModuleSpec(module=Layer)),
        layer_type_list=[stack.LayerSymbols.MOE] * places,
        post_layer_norm=False,
        pg_collection=groups(),
        is_mtp_layer=predicts,
    )
    return [layer.router for layer in made.layers]


def run(
    *, z_loss: bool, stacked: bool, repeated: bool = True, predictions: int = 2, places: int = 1, **asked: Any
) -> Any:
    """Return the gradient of the last router's weights, and the logged losses, by layer."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    predicts = asked.pop("predicts", True)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.0 if z_loss else 0.5,
        moe_z_loss_coeff=0.5 if z_loss else None,
        mtp_num_layers=predictions,
        mtp_use_repeated_layer=repeated,
        add_bias_linear=False,
        use_cpu_initialization=True,
        **asked,
    )
    logged = log()
    logged.clear()
    generator = torch.Generator().manual_seed(4)
    made = routers(config, places, predicts=predicts, stacked=stacked)
    weight = torch.randn(made[0].weight.shape, generator=generator)
    states = torch.randn(TOKENS, 1, HIDDEN, generator=generator).to(DEVICE)
    try:
        for router in made:
            router.to(DEVICE)
            with torch.no_grad():
                router.weight.copy_(weight)
            for _ in range(predictions if repeated else 1):
                shares, _ = router(states)
                (shares * 0.0).sum().backward()
    except IndexError as error:
        return {"raised": type(error).__name__}
    (entry,) = logged.values()
    values = entry["values"] if isinstance(entry, dict) else entry.values
    return {"gradient": made[-1].weight.grad.flatten().tolist(), "logged": values.tolist()}


def log() -> dict[str, Any]:
    """Return the place of this release's logged losses."""
    utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    with contextlib.suppress(AttributeError):
        found: dict[str, Any] = utils.get_moe_metrics_tracker()._metrics
        return found
    old: dict[str, Any] = utils.get_moe_layer_wise_logging_tracker()
    return old


def facts() -> dict[str, Any]:
    found: dict[str, Any] = {}
    ways = (True, False) if modules()[0] is not None else (False,)
    for stacked in ways:
        for z_loss in (True, False):
            name = f"{'stacked' if stacked else 'marked'}, {'z-loss' if z_loss else 'balance'}"
            found[name] = {
                "once": run(z_loss=z_loss, stacked=stacked, predictions=1),
                "twice": run(z_loss=z_loss, stacked=stacked),
                "thrice, over tokens": run(
                    z_loss=z_loss, stacked=stacked, predictions=3, calculate_per_token_loss=True
                ),
                "once, over tokens": run(z_loss=z_loss, stacked=stacked, predictions=1, calculate_per_token_loss=True),
                "a layer each": run(z_loss=z_loss, stacked=stacked, repeated=False),
                "decoder": run(z_loss=z_loss, stacked=stacked, predicts=False),
            }
    if ways[0]:
        found["second place"] = run(z_loss=False, stacked=True, predictions=1, places=2)
    return found


def main() -> None:
    """Answer on standard output."""
    torch.set_num_threads(1)
    if ON_CPU:
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value] # upstream makes tensors there
    modules()
    with tempfile.TemporaryDirectory() as folder:  # NCCL's groups meet in it when they are used first
        torch.distributed.init_process_group(
            "gloo" if ON_CPU else "nccl", init_method=f"file://{folder}/meet", rank=0, world_size=1
        )
        importlib.import_module("megatron.core.parallel_state").initialize_model_parallel()
        records = {each.overlay.id: each for each in megacpp_overlays.audit().records}
        answer: dict[str, Any] = {"decisions": {name: records[name].decision.value for name in IDS}, "on": facts()}
        megacpp_overlays.undo()
        answer["off"] = facts()
        torch.distributed.destroy_process_group()
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
