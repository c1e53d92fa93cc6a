"""Gradients of real MoE routers from balancing losses under padding masks, on one rank and on two, as JSON.

The release is the one that is first on the path. It is asked with the overlays and without them, each time in ranks
that are forked and meet with gloo. Two ranks have half of the tokens each, under tensor parallelism a half of each row,
under data parallelism one row; their gradients are summed.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megacpp_overlays

# isort: split
import torch
from forked_ranks import on_ranks
from torch import Tensor

IDS = (
    "masked-aux-loss-tokens",
    "hybrid-mtp-aux-loss",
    "mtp-z-loss",
    "seq-aux-loss-packed",
    "expert-bias-padding-mask",
    "pipeline-padding-mask",
)
"""The overlay, and others at the same routers."""
ROWS, TOKENS, HIDDEN, EXPERTS = 2, 16, 8, 4
KINDS = ("aux_loss", "seq_aux_loss", "global_aux_loss")
BIASED = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_dtype": "fp32",
}
MASKS: dict[str, Tensor | None] = {
    "no mask": None,
    "nothing": torch.zeros(TOKENS, ROWS, dtype=torch.bool),
    "even": (torch.arange(TOKENS) % 8 >= 5)[:, None].expand(TOKENS, ROWS),
    "uneven": torch.arange(TOKENS)[:, None] >= TOKENS - torch.tensor([6, 3]),
}
"""Padding masks: bool, [tokens, rows]. In `even`, the halves of a row have the same number of tokens, and so have the rows."""
MODULES = (
    "megatron.core.transformer.moe.router",
    "megatron.core.transformer.transformer_layer",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.hybrid.hybrid_block",
)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.cuda.current_device = lambda: torch.device("cpu")
    for each in MODULES:
        importlib.import_module(each)
    records = {each.overlay.id: each for each in megacpp_overlays.audit().records}
    report: dict[str, Any] = {"decisions": {each: records[each].decision.value for each in IDS}}
    report["on"] = by_ranks(with_bias=True)
    megacpp_overlays.undo()
    report["off"] = by_ranks(with_bias=False)  # upstream ends in an error there, see pack 34
    sys.stdout.write(json.dumps(report))


def by_ranks(*, with_bias: bool) -> dict[str, Any]:
    """Return the gradients on one rank, and on two of either kind, by case."""
    found = {}
    for name, ranks, tensor in (("one", 1, 1), ("tensor", 2, 2), ("data", 2, 1)):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = on_ranks(ranks, Path(folder), lambda _, tensor=tensor: on_a_rank(tensor, with_bias))[0]
    return found


def on_a_rank(tensor: int, with_bias: bool) -> dict[str, list[float]]:
    importlib.import_module("megatron.core.parallel_state").initialize_model_parallel(tensor_model_parallel_size=tensor)
    found = {}
    for name, mask in MASKS.items():
        for kind in KINDS:
            found[f"{kind}, {name}"] = learnt(tensor, kind, mask)
            found[f"{kind}, {name}, for each batch"] = learnt(tensor, kind, mask, calculate_per_token_loss=False)
            if with_bias:
                found[f"{kind}, {name}, biased"] = learnt(tensor, kind, mask, **BIASED)
        found[f"packed, {name}"] = learnt(tensor, "seq_aux_loss", mask, is_packed=tensor > 1)
    return found


class RoutingLayer(torch.nn.Module):  # type: ignore[misc] # torch is not seen by the type checker
    """An MoE layer that routes and has no experts."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.router = router

    def forward(self, states: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, None]:
        """Route as `MoELayer.forward` does, whose mask has the rows first."""
        mask = {} if padding_mask is None else {"padding_mask": padding_mask.transpose(0, 1)}
        self.probabilities, _ = self.router(states, **mask)
        return states, None


def layer_of(config: Any, groups: Any, experts: RoutingLayer) -> Any:
    """Return a TransformerLayer that is nothing but its MLP: its constructor would make attention."""
    cls = importlib.import_module(MODULES[1]).TransformerLayer
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    layer.config, layer.pg_collection, layer.mlp = config, groups, experts
    layer.is_moe_layer, layer.recompute_mlp = True, False
    layer._forward_pre_mlp_layernorm = lambda states: states
    layer._forward_post_mlp = lambda output, _: output
    return layer


def learnt(tensor: int, kind: str, mask: Tensor | None, *, is_packed: bool = False, **options: Any) -> list[float]:
    """Return the gradients of the weights of a router, [experts, hidden], from its balancing loss on all ranks."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        **{
            "num_layers": 1,
            "hidden_size": HIDDEN,
            "num_attention_heads": 2,
            "num_moe_experts": EXPERTS,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": kind,
            "moe_aux_loss_coeff": 0.5,
            "calculate_per_token_loss": True,
            "tensor_model_parallel_size": tensor,
            "sequence_parallel": tensor > 1,
            "add_bias_linear": False,
            "use_cpu_initialization": True,
            **options,
        }
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    router = importlib.import_module(MODULES[0]).TopKRouter(config, groups)
    router.set_layer_number(1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        router.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=generator))
    tokens = torch.randn(TOKENS, ROWS, HIDDEN, generator=generator)
    masks = torch.zeros(TOKENS, ROWS, dtype=torch.bool) if mask is None else mask
    if is_packed:
        tokens, masks = tokens.transpose(0, 1).reshape(-1, 1, HIDDEN), masks.transpose(0, 1).reshape(-1, 1)
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    tokens, masks = (each.chunk(ranks, dim=0 if tensor > 1 else 1)[rank] for each in (tokens, masks))
    if is_packed:
        experts = RoutingLayer(router)
        layer = layer_of(config, groups, experts)
        packing = SimpleNamespace(tokens_per_sample=TOKENS)
        layer._forward_mlp(
            tokens, padding_mask=None if mask is None else masks.transpose(0, 1), packed_seq_params=packing
        )
        probabilities = experts.probabilities
    else:
        probabilities, _ = router(tokens) if mask is None else router(tokens, padding_mask=masks)
    (probabilities * 0.0).sum().backward()
    gradient = router.weight.grad
    torch.distributed.all_reduce(gradient)
    flat: list[float] = gradient.flatten().tolist()
    return flat


if __name__ == "__main__":
    main()
