"""Megatron's layers whose gradients are right without the overlay, and what they recompute: without graphs, with graphs of other parts or
of a whole iteration, and with nothing that a graph would lose."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Neighbour, TargetAbsent, beside, on_ranks

PACK = beside(__file__)


def _learnt(graphs: str, recompute: Sequence[str], parts: Sequence[str] = ()) -> Mapping[str, object]:
    """Return what a layer computes and learns, and how often it computes what may be recomputed.

    Args:
        graphs: the kind of CUDA graphs that the layer is made for.
        recompute: the modules that are recomputed.
        parts: what graphs capture; nothing for whole layers.
    """
    import torch

    importlib.import_module(PACK.LAYER)
    module: Any = importlib.import_module(PACK.GRAPHS)
    if not hasattr(getattr(module, "_CudaGraphRunner", None), "get_connected_params"):
        raise TargetAbsent("no local graph looks for parameters")
    random: Any = importlib.import_module(PACK.RANDOM)
    if hasattr(random, "_share_storage_ext"):
        random._share_storage_ext = SimpleNamespace(share_storage=_copied)  # upstream's takes a compiler 40 seconds
    config = _config(graphs, recompute, parts)

    def run(_: int) -> Mapping[str, Any]:
        from megatron.core import parallel_state

        module.CudaGraphManager = lambda *_, **__: PACK._captured
        PACK._as_on_a_cpu(torch)
        torch.manual_seed(1)
        parallel_state.initialize_model_parallel()
        layer = _layer(config)
        calls = {
            name: list[int]() for name in ("input_layernorm", "self_attention.core_attention", "pre_mlp_layernorm")
        }
        for name, each in calls.items():
            layer.get_submodule(name).register_forward_hook(lambda *_, each=each: each.append(1))
        states = torch.randn(PACK.TOKENS, 1, PACK.HIDDEN, requires_grad=True)
        output, _bias = layer(states, attention_mask=None)
        output.sin().sum().backward()
        learnt = {f"gradient of {name}": each.grad for name, each in layer.named_parameters()}
        times = {f"times of {name}": len(each) for name, each in calls.items()}
        return {"output": output, "gradient of states": states.grad, **learnt, **times}

    return on_ranks(1, run)


def _config(graphs: str, recompute: Sequence[str], parts: Sequence[str]) -> Any:
    """Return the configuration of a layer.

    Raises:
        TargetAbsent: the release has no such graphs.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    named = (
        "cuda_graph_modules" if "cuda_graph_modules" in TransformerConfig.__dataclass_fields__ else "cuda_graph_scope"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return TransformerConfig(
                num_layers=1,
                hidden_size=PACK.HIDDEN,
                num_attention_heads=2,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                use_cpu_initialization=True,
                bias_dropout_fusion=False,
                cuda_graph_impl=graphs,
                recompute_granularity="selective",
                recompute_modules=[*recompute],
                **({named: [*parts]} if parts else {}),
            )
        except AssertionError as error:
            if "Invalid cuda graph implementation" not in str(error):
                raise
            raise TargetAbsent(f"there are no CUDA graphs of the kind {graphs}") from error


def _layer(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = PACK._attention()
    return build_module(spec, config=config, layer_number=1)


def _copied(to: Any, what: Any) -> None:
    """Restore an output as releases up to 0.16.1 do."""
    import torch

    with torch.no_grad():
        to.untyped_storage().resize_(what.untyped_storage().size())
        to.untyped_storage().copy_(what.untyped_storage())


def _neighbour(name: str, *asked: Any) -> Neighbour:
    run = functools.partial(_learnt, *asked)
    return Neighbour(name=name, overlay="graph-hidden-recompute-grads", run=run)


NEIGHBOURS = (
    _neighbour("no-graphs", "none", ("layernorm", "core_attn")),
    _neighbour("graphs-of-another-part", "local", ("layernorm",), ("mamba",)),
    _neighbour("graphs-of-an-iteration", "full_iteration", ("layernorm",)),
    _neighbour("attention-in-graphs", "local", ("core_attn",)),
)
