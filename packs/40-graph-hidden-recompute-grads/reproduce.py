"""Megatron's local CUDA graphs with recomputed layer norms: does a graph find every parameter of its layer?

A graph needs a GPU, and is not made here. What it would capture is: a real transformer layer, made with a configuration for local graphs,
runs as it would be captured, and Megatron's own walk back from the outputs, `get_connected_params`, says which parameters would be given
gradients. All that need one are to be found.
"""

from __future__ import annotations

import importlib
import multiprocessing
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

LAYER = "megatron.core.transformer.transformer_layer"
GRAPHS = "megatron.core.transformer.cuda_graphs"
RANDOM = "megatron.core.tensor_parallel.random"
TOKENS, HIDDEN = 8, 32


def _run() -> Behaviour:
    """Run in a fork, which may say where Megatron's tensors go."""
    import torch  # noqa: F401 - once, before the fork

    importlib.import_module(LAYER)
    graphs: Any = importlib.import_module(GRAPHS)
    if not hasattr(getattr(graphs, "_CudaGraphRunner", None), "get_connected_params"):
        raise TargetAbsent("no local graph looks for parameters")
    if "needs_recompute_param_discovery" in Path(graphs.__file__ or "").read_text():
        raise Blocked("graphs look for parameters in a warm-up, which needs a GPU")
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_walked, args=(Path(folder),))
        process.start()
        process.join()
        count, *lost = Path(folder, "lost").read_text().split()
    which = f": {', '.join(lost)}" if lost else ""
    return Behaviour(broken=bool(lost), seen=f"of {count} parameters of a layer a graph does not find {len(lost)}{which}")


def _walked(folder: Path) -> None:
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    class Attention(torch.nn.Module):  # type: ignore[misc]
        """Plain attention in place of the core, which has its mask on a GPU."""

        def __init__(self, **_: Any) -> None:
            super().__init__()

        def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
            q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)

    graphs: Any = importlib.import_module(GRAPHS)
    graphs.CudaGraphManager = lambda *_, **__: _captured
    _as_on_a_cpu(torch)
    torch.manual_seed(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=2,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            bias_dropout_fusion=False,
            cuda_graph_impl="local",
            recompute_granularity="selective",
            recompute_modules=["layernorm", "core_attn"],
        )
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = Attention
    layer = build_module(spec, config=config, layer_number=1)
    output, _ = layer(torch.randn(TOKENS, 1, HIDDEN, requires_grad=True), attention_mask=None)
    runner = graphs._CudaGraphRunner.__new__(graphs._CudaGraphRunner)  # noqa: SLF001 - its walk is what is asked
    torch.nn.Module.__init__(runner)
    vars(runner)["base_module"] = layer
    found = {id(each) for each in runner.get_connected_params(output)}
    names = dict(layer.named_parameters())
    lost = [name for name, each in names.items() if id(each) not in found]
    (folder / "lost").write_text(" ".join([str(len(names)), *lost]))
    torch.distributed.destroy_process_group()


def _captured(layer: Any, args: Any, kwargs: Any) -> Any:
    """Run what a graph of a layer would capture."""
    from megatron.core.transformer.module import MegatronModule

    return super(MegatronModule, layer).__call__(*args, **kwargs)


def _as_on_a_cpu(torch: Any) -> None:
    """Do without the state of CUDA's random numbers, and without Transformer Engine's FP8."""
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    random: Any = importlib.import_module(RANDOM)
    if not hasattr(random, "FP8GlobalStateManager"):
        random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
        random.activation_recompute_forward = lambda **_: nullcontext()
        random.fp8_autocast = lambda **_: nullcontext()


CASES = (
    Case(
        name="walk-cpu",
        overlay="graph-hidden-recompute-grads",
        device="cpu",
        versions=("torch",),
        run=_run,
        targets=(LAYER,),
    ),
)
