"""Layers of a release of Megatron that recompute under CUDA graphs, and the parameters that graphs find, as JSON.

A graph needs a GPU. So the stand-in for its manager runs the code that a graph would capture, and then asks the release's own walk back from
the outputs for the parameters that it finds.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import warnings
from typing import Any

import torch
from places import ROOT

import megacpp_overlays
from megacpp_overlays.repro import neighbour

PACK = neighbour.beside(str(ROOT / "packs/40-graph-hidden-recompute-grads/neighbours.py"))
OVERLAY = "graph-hidden-recompute-grads"
TOKENS, BATCH, HIDDEN = 8, 1, 32
BOTH, ALL = ["layernorm", "core_attn"], ["layernorm", "mla_up_proj", "core_attn"]
GPT: dict[str, tuple[dict[str, Any], list[str]]] = {
    "none": ({}, BOTH),
    "local": ({"cuda_graph_impl": "local"}, BOTH),
    "local, attention": ({"cuda_graph_impl": "local", "parts": "attn"}, BOTH),
    "local, mamba": ({"cuda_graph_impl": "local", "parts": "mamba"}, BOTH),
    "local, alone": ({"cuda_graph_impl": "local"}, ["layernorm"]),
    "local, nothing hidden": ({"cuda_graph_impl": "local"}, ["core_attn"]),
    "deprecated": ({"enable_cuda_graph": True}, BOTH),
    "te": ({"cuda_graph_impl": "transformer_engine"}, BOTH),
}
"""Settings of a layer: options of graphs, and the modules to recompute."""
MLA: dict[str, tuple[dict[str, Any], list[str]]] = {
    "mla, none": ({}, ALL),
    "mla, local": ({"cuda_graph_impl": "local"}, ALL),
}


def as_on_a_cpu() -> None:
    """Let a host without a GPU or Transformer Engine run layers: no state of CUDA's random numbers, and no FP8."""
    PACK._as_on_a_cpu(torch)
    attention = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    if not isinstance(getattr(attention, "TELinear", torch.nn.Bilinear), type):
        attention.TELinear = torch.nn.Bilinear  # a class that no layer is of, for 0.16.1, which asks for one
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        importlib.import_module("megatron.core.parallel_state").initialize_model_parallel()


class Walk:
    """Runs the code that a graph of a layer would capture, and keeps the parameters that would get gradients from a graph."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.found: set[str] = set()

    def __call__(self, layer: Any, args: Any, kwargs: Any) -> Any:
        from megatron.core.transformer.cuda_graphs import _CudaGraphRunner

        outputs = PACK._captured(layer, args, kwargs)
        self.found = connected(_CudaGraphRunner, layer, outputs)
        return outputs


def connected(runners: Any, layer: Any, outputs: Any) -> set[str]:
    """Return the names of the parameters that the release's own walk finds."""
    runner = runners.__new__(runners)
    torch.nn.Module.__init__(runner)
    vars(runner)["base_module"] = layer
    found = {id(each) for each in runner.get_connected_params(outputs)}
    return {name for name, each in layer.named_parameters() if id(each) in found}


def configured(options: dict[str, Any], recomputed: list[str], *, mla: bool) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    options = dict(options)
    if parts := options.pop("parts", None):
        options["cuda_graph_modules" if hasattr(TransformerConfig, "cuda_graph_modules") else "cuda_graph_scope"] = [
            parts
        ]
    common = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "bias_dropout_fusion": False,
        "recompute_granularity": "selective",
        "recompute_modules": recomputed,
        **options,
    }
    if not mla:
        return TransformerConfig(**common)
    shape = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}
    return MLATransformerConfig(**common, **shape, rope_type="rope", normalization="RMSNorm", add_bias_linear=False)


def made(config: Any, *, mla: bool) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    torch.manual_seed(3)
    spec = get_gpt_layer_local_spec(multi_latent_attention=mla, normalization=config.normalization)
    spec.submodules.self_attention.submodules.core_attention = PACK._attention()
    return build_module(spec, config=config, layer_number=1)


def facts(options: dict[str, Any], recomputed: list[str], *, mla: bool) -> dict[str, Any]:
    """Return the modules that one layer recomputes, the parameters that its graph would not find, and whether gradients are right."""
    given = list(recomputed)
    config = configured(options, given, mla=mla)
    layer = made(config, mla=mla)
    states = torch.randn(TOKENS, BATCH, HIDDEN, generator=torch.Generator().manual_seed(4)).requires_grad_()
    output, _ = layer(states, attention_mask=None)
    walk = getattr(layer, "cudagraph_manager", None)
    found = None if walk is None else sorted({name for name, _ in layer.named_parameters()} - walk.found)
    return {
        "modules": config.recompute_modules,
        "granularity": config.recompute_granularity,
        "given": given,
        "norms": [layer.recompute_input_layernorm, layer.recompute_pre_mlp_layernorm],
        "projections": getattr(layer.self_attention, "recompute_up_proj", None),
        "lost": found,
        "output": float(output.double().sum()),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    importlib.import_module("megatron.core.transformer.transformer_layer")
    as_on_a_cpu()
    importlib.import_module("megatron.core.transformer.cuda_graphs").CudaGraphManager = Walk
    records = {each.overlay.id: each for each in megacpp_overlays.audit().records}
    found: dict[str, Any] = {"decision": records[OVERLAY].decision.value}
    for way in ("on", "off"):
        found[way] = {name: facts(*case, mla=name in MLA) for name, case in (GPT | MLA).items()}
        megacpp_overlays.undo()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
