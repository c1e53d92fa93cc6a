"""Megatron's layers on explicit tensor parallel groups: do they do what they do on one rank?

Four ranks are forked and meet with gloo. The default tensor parallel groups are ranks 0 and 1, and 2 and 3; each layer is given 0 and 2, or 1
and 3, and other values on each of these pairs. Its output and gradients are compared with a rank's share of what the same layer does on one rank: a
real `CrossAttention`, a real `MLASelfAttention` with down projections cut by columns, the method by which LLaVA shares embeddings out, and a real
`TransformerBlock` that recomputes itself and shares out what it saves.

GPUs are not touched: random numbers of one are neither kept nor set.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent

UTILS = "megatron.core.utils"
ATTENTION = "megatron.core.transformer.attention"
LATENT = "megatron.core.transformer.multi_latent_attention"
LLAVA = "megatron.core.models.multimodal.llava_model"
BLOCK = "megatron.core.transformer.transformer_block"
NUMBERS = "megatron.core.tensor_parallel.random"
HIDDEN, HEADS, RANK, WIDTH, ROTARY, TOKENS = 16, 4, 8, 6, 4, 8
RANKS, PAIRS = 4, ([0, 2], [1, 3])
TOLERANCE = 1e-4
"""Relative, of the largest value. Ranks add in another order than one does: fp32 rounding, 1e-6."""


def _run(build: Callable[[Any], Any], module: str, *, is_cut: bool) -> Behaviour:
    """Compare a layer on pairs with itself on one rank.

    Args:
        build: gets groups, and returns the layer.
        module: is imported before ranks are forked.
        is_cut: whether its output has the part of the sequence that a rank has.
    """
    for name in (UTILS, NUMBERS, module):
        _imported(name)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_on_rank, args=(build, is_cut, rank, folder)) for rank in range(RANKS)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]
    output, gradients = (max(each[number] for each in found) for number in (0, 1))
    return Behaviour(
        broken=max(output, gradients) > TOLERANCE,
        seen=f"on two pairs of ranks the output is up to {output:.1e} of the largest value apart from that of one rank, and gradients {gradients:.1e}",
    )


def _on_rank(build: Callable[[Any], Any], is_cut: bool, rank: int, folder: str) -> None:
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    alone = [torch.distributed.new_group([each]) for each in range(RANKS)][rank]
    pair = next(number for number, ranks in enumerate(PAIRS) if rank in ranks)
    group = [torch.distributed.new_group(ranks) for ranks in PAIRS][pair]
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    true = _step(build(_groups(alone, alone)), alone, pair, is_cut=is_cut)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    found = _step(build(_groups(group, alone)), group, pair, is_cut=is_cut)
    wanted = {name: _share(name, each, group, is_cut=is_cut) for name, each in true.items()}
    apart = {name: float((found[name] - each).abs().max() / each.abs().max()) for name, each in wanted.items()}
    report = [apart.pop("output"), max(apart.values())]
    Path(folder, str(rank)).write_text(json.dumps(report))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _step(layer: Any, group: Any, pair: int, *, is_cut: bool) -> dict[str, Any]:
    """Fill a layer with its share of weights, run it on the values of a pair, and return what comes out and is learnt."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, each in sorted(layer.named_parameters()):
            axis, shares = _axis(name), group.size()
            shape = [size * (shares if number == axis else 1) for number, size in enumerate(each.shape)]
            each.copy_(_share(name, torch.randn(*shape, generator=generator) * 0.4, group, is_cut=False))
    generator = torch.Generator().manual_seed(2 + pair)
    hidden, weights = (torch.randn(TOKENS, 1, HIDDEN, generator=generator) for _ in range(2))
    hidden.requires_grad_()
    output = layer(hidden)
    (output * _share("output", weights, group, is_cut=is_cut)).sum().backward()
    return {"output": output.detach(), "hidden": hidden.grad, **{name: each.grad for name, each in layer.named_parameters()}}


def _axis(name: str) -> int | None:
    """Return along which axis ranks share a weight; None where each has all of it."""
    if name.rpartition(".")[0].endswith(("linear_proj",)):
        return 1
    return 0 if "linear" in name else None


def _share(name: str, whole: Any, group: Any, *, is_cut: bool) -> Any:
    axis = (0 if is_cut else None) if name == "output" else _axis(name)
    return whole if axis is None else whole.chunk(group.size(), axis)[group.rank()]


def _groups(group: Any, alone: Any) -> dict[str, Any]:
    """Return a collection with that tensor parallel group, and groups of one rank for all else, under the name that a release knows."""
    module = importlib.import_module("megatron.core.process_groups_config")
    is_new = hasattr(module, "ProcessGroupCollection")
    found = module.ProcessGroupCollection() if is_new else module.ModelCommProcessGroups()
    for name in ("cp", "pp", "dp", "dp_cp", "ep", "tp_cp", "embd"):
        setattr(found, name, alone)
    found.tp = group
    return {"pg_collection" if is_new else "model_comm_pgs": found}


def _tp(groups: dict[str, Any]) -> Any:
    (found,) = groups.values()
    return found.tp


def _common(groups: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": _tp(groups).size(),
        "use_cpu_initialization": True,
    }


def _core() -> Any:
    import torch

    class Core(torch.nn.Module):  # type: ignore[misc]
        """Plain scaled products."""

        def __init__(self, **_: Any) -> None:
            super().__init__()

        def forward(self, query: Any, key: Any, value: Any, _mask: Any, **_: Any) -> Any:
            scores = torch.einsum("sbhd,tbhd->bhst", query, key) * 0.5
            return torch.einsum("bhst,tbhv->sbhv", scores.softmax(-1), value).flatten(2)

    return Core


def _cross() -> Behaviour:
    def build(groups: dict[str, Any]) -> Any:
        import torch
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.attention import CrossAttention, CrossAttentionSubmodules
        from megatron.core.transformer.transformer_config import TransformerConfig

        class Layer(torch.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                parts = CrossAttentionSubmodules(
                    linear_q=ColumnParallelLinear,
                    linear_kv=ColumnParallelLinear,
                    core_attention=_core(),
                    linear_proj=RowParallelLinear,
                )
                self.attention = CrossAttention(TransformerConfig(**_common(groups)), parts, layer_number=1, **groups)

            def forward(self, hidden: Any) -> Any:
                return self.attention(hidden, None, key_value_states=hidden.flip(0).contiguous())[0]

        return Layer()

    return _run(build, ATTENTION, is_cut=False)


def _latents() -> Behaviour:
    module = _imported(LATENT)
    if not isinstance(getattr(module, "TELinear", None), type):
        module.HAVE_TE = False  # 0.16.1 says that it has Transformer Engine's layers, and has mocks
    if not hasattr(module, "Linear"):
        module.Linear = importlib.import_module("megatron.core.post_training.modelopt.layers").Linear

    def build(groups: dict[str, Any]) -> Any:
        import torch
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.identity_op import IdentityOp
        from megatron.core.transformer.spec_utils import ModuleSpec
        from megatron.core.transformer.transformer_config import MLATransformerConfig

        class Layer(torch.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                config = MLATransformerConfig(
                    **_common(groups),
                    q_lora_rank=RANK,
                    kv_lora_rank=RANK,
                    qk_head_dim=WIDTH,
                    qk_pos_emb_head_dim=ROTARY,
                    v_head_dim=WIDTH,
                    rope_type="rope",
                    apply_rope_fusion=False,
                    **({"transformer_impl": "local"} if hasattr(MLATransformerConfig, "transformer_impl") else {}),
                )
                parts = module.MLASelfAttentionSubmodules(
                    linear_q_proj=ColumnParallelLinear,
                    linear_q_down_proj=ColumnParallelLinear,
                    linear_q_up_proj=ColumnParallelLinear,
                    linear_kv_down_proj=ColumnParallelLinear,
                    linear_kv_up_proj=ColumnParallelLinear,
                    core_attention=ModuleSpec(module=_core()),
                    linear_proj=RowParallelLinear,
                    q_layernorm=IdentityOp,
                    kv_layernorm=IdentityOp,
                )
                self.attention = module.MLASelfAttention(config, parts, layer_number=1, **groups)

            def forward(self, hidden: Any) -> Any:
                return self.attention(hidden, None)[0]

        return Layer()

    return _run(build, LATENT, is_cut=False)


def _embeddings() -> Behaviour:
    def build(groups: dict[str, Any]) -> Any:
        import torch

        model = importlib.import_module(LLAVA).LLaVAModel

        class Layer(torch.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(HIDDEN, HIDDEN))

            def forward(self, hidden: Any) -> Any:
                holder = SimpleNamespace(
                    pre_process=True,
                    post_process=False,
                    context_parallel_lm=1,
                    sequence_parallel_lm=True,
                    tensor_model_parallel_size_lm=_tp(groups).size(),
                    tp_comm_overlap_lm=False,
                    **groups,
                )
                share_out = model._process_embedding_token_parallel  # noqa: SLF001 - it is what is asked about
                return share_out(holder, hidden @ self.weight, None, None, None)[0]

        return Layer()

    return _run(build, LLAVA, is_cut=True)


def _saved() -> Behaviour:
    def build(groups: dict[str, Any]) -> Any:
        import torch
        from megatron.core.transformer.spec_utils import ModuleSpec
        from megatron.core.transformer.transformer_config import TransformerConfig

        module = importlib.import_module(BLOCK)

        class Inner(torch.nn.Module):  # type: ignore[misc]
            def __init__(self, **_: Any) -> None:
                super().__init__()
                self.layer_number, self.weight = 1, torch.nn.Parameter(torch.ones(HIDDEN, HIDDEN))

            def forward(self, hidden_states: Any, **_: Any) -> Any:
                return (hidden_states @ self.weight).tanh(), None

        class Layer(torch.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                config = TransformerConfig(
                    **_common(groups),
                    recompute_granularity="full",
                    recompute_method="uniform",
                    recompute_num_layers=1,
                    distribute_saved_activations=True,
                )
                layers = module.TransformerBlockSubmodules(layer_specs=[ModuleSpec(module=Inner)], layer_norm=None)
                self.block = module.TransformerBlock(config, layers, post_layer_norm=False, **groups)

            def forward(self, hidden: Any) -> Any:
                # What is shared out is cut where it lies, so it must not be the input whose gradient is asked for.
                return self.block(hidden_states=hidden * 1.0, attention_mask=None)

        return Layer()

    return _run(build, BLOCK, is_cut=False)


def _imported(name: str) -> Any:
    """Return a module, with everything that is asked for on a GPU made on the CPU.

    Raises:
        TargetAbsent: there is none, or nothing takes groups there.
    """
    import torch

    warnings.simplefilter("ignore")
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")  # 0.15 compiles something for a GPU as it is imported, and asks for which
    torch.cuda.current_device = lambda: torch.device("cpu")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith(str(error.name)):
            raise
        raise TargetAbsent(f"there is no {name}") from error
    if name == UTILS and not hasattr(module, "get_tensor_model_parallel_group_if_none"):
        raise TargetAbsent("nothing takes groups")
    if name == NUMBERS:
        vars(module).update(_get_cuda_rng_state=lambda *_, **__: None, _set_cuda_rng_state=lambda *_, **__: None)
        module.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    return module


def _case(name: str, run: Callable[[], Behaviour], module: str) -> Case:
    return Case(name=name, overlay="explicit-tp-groups", device="cpu", versions=("torch",), run=run, targets=(module,))


CASES = (
    _case("cross-attention-cpu", _cross, ATTENTION),
    _case("latents-cpu", _latents, LATENT),
    _case("embeddings-cpu", _embeddings, LLAVA),
    _case("saved-cpu", _saved, NUMBERS),
)
