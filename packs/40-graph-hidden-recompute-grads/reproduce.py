"""Megatron's local CUDA graphs with recomputed layer norms: does every parameter of a layer get its gradient?

On a CPU no graph is made. What one would capture is: a real transformer layer, made with a configuration for local graphs, runs as it
would be captured, and Megatron's own walk back from the outputs, `get_connected_params`, says which parameters would be given
gradients. All that need one are to be found.

On a GPU a real GPT in Megatron's DDP records its graphs in a first step, which runs without them, captures them, and takes the same
step by replay. The gradients of the two are to be the same.
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
SEQUENCE, VOCABULARY = 64, 128
ROUNDING = 1e-4
"""Between a replay and the step that it was captured from, in float32, norm over norm."""


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
    spec.submodules.self_attention.submodules.core_attention = _attention()
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


def _attention() -> Any:
    import torch

    class Attention(torch.nn.Module):  # type: ignore[misc]
        """Plain attention in place of the core, which has its mask on a GPU, or is Transformer Engine's."""

        def __init__(self, **_: Any) -> None:
            super().__init__()

        def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
            q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)

    return Attention


def _captured(layer: Any, args: Any, kwargs: Any) -> Any:
    """Run what a graph of a layer would capture."""
    from megatron.core.transformer.module import MegatronModule

    return super(MegatronModule, layer).__call__(*args, **kwargs)


def _as_on_a_cpu(torch: Any) -> None:
    """Do without the state of CUDA's random numbers, and without Transformer Engine's FP8."""
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    _without_fp8()


def _without_fp8() -> None:
    """Stand in for Transformer Engine's state of FP8, which is asked for without FP8, too."""
    random: Any = importlib.import_module(RANDOM)
    if not hasattr(random, "FP8GlobalStateManager"):
        random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
        random.activation_recompute_forward = lambda **_: nullcontext()
        random.fp8_autocast = lambda **_: nullcontext()


def _graphs() -> Behaviour:
    """Replay a step of a GPT with layer norms that are recomputed."""
    return _replayed(mla=False)


def _graphs_of_mla() -> Behaviour:
    """Replay a step of one with multi-latent attention, whose up projections are recomputed, too."""
    return _replayed(mla=True)


def _replayed(*, mla: bool) -> Behaviour:
    import torch

    graphs: Any = importlib.import_module(GRAPHS)
    if not hasattr(getattr(graphs, "_CudaGraphRunner", None), "get_connected_params"):
        raise TargetAbsent("no local graph looks for parameters")
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        model = _gpt(mla=mla)
        tokens = torch.randint(VOCABULARY, (1, SEQUENCE), device="cuda")
        eager = _gradients(model, tokens)
        graphs.create_cudagraphs()
        if not graphs._CudagraphGlobalRecord.cudagraph_created:  # noqa: SLF001 - whether there is anything to replay
            raise Blocked("this configuration makes no graph")
        _gradients(model, tokens)
        replayed = _gradients(model, tokens)
        graphs.delete_cuda_graphs()
        torch.distributed.destroy_process_group()
    apart = {name: float((replayed[name] - true).norm() / true.norm()) for name, true in eager.items()}
    lost = [name for name in eager if not replayed[name].any()]
    rest = max(value for name, value in apart.items() if name not in lost)
    which = f": {', '.join(lost)}" if lost else ""
    return Behaviour(
        broken=bool(lost) or rest > ROUNDING,
        seen=f"of {len(eager)} gradients of {'an MLA' if mla else 'a'} GPT {len(lost)} are zero when graphs are replayed{which}; "
        f"the others are within {rest:.1e} of the same step without graphs",
    )


def _gpt(*, mla: bool) -> Any:
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    parallel_state.initialize_model_parallel()
    tensor_parallel.random.model_parallel_cuda_manual_seed(1, use_cudagraphable_rng=True)
    _without_fp8()
    latent = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 16, "v_head_dim": 16}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = (MLATransformerConfig if mla else TransformerConfig)(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
            add_bias_linear=False,
            cuda_graph_impl="local",
            recompute_granularity="selective",
            recompute_modules=["layernorm", *(["mla_up_proj"] if mla else [])],
            **({**latent, "rope_type": "rope"} if mla else {}),
        )
    spec = get_gpt_layer_local_spec(multi_latent_attention=mla)
    spec.submodules.self_attention.submodules.core_attention = _attention()
    model = GPTModel(config, spec, VOCABULARY, SEQUENCE, position_embedding_type="rope" if mla else "learned_absolute")
    torch.manual_seed(40)
    return DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model.cuda())


def _gradients(model: Any, tokens: Any) -> dict[str, Any]:
    """Take a step without its update, and return what it adds to the gradients, by name."""
    import torch

    model.zero_grad_buffer()
    positions = torch.arange(SEQUENCE, device="cuda")[None]
    model(tokens, positions, None, labels=tokens.roll(-1, 1)).mean().backward()
    model.finish_grad_sync()
    return {name: each.main_grad.clone() for name, each in model.named_parameters()}


CASES = (
    Case(
        name="walk-cpu",
        overlay="graph-hidden-recompute-grads",
        device="cpu",
        versions=("torch",),
        run=_run,
        targets=(LAYER,),
    ),
    Case(
        name="graph-gpu",
        overlay="graph-hidden-recompute-grads",
        device="cuda",
        versions=("torch",),
        run=_graphs,
        targets=(LAYER,),
    ),
    Case(
        name="graph-mla-gpu",
        overlay="graph-hidden-recompute-grads",
        device="cuda",
        versions=("torch",),
        run=_graphs_of_mla,
        targets=(LAYER,),
    ),
)
