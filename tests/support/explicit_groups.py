"""Run in a fresh interpreter: layers on tensor parallel groups of their own, with the overlay and without it; JSON.

    STATES="on off" python tests/support/explicit_groups.py FOLDER LAYOUTS...

The release is the one that is first on the path. Four ranks are forked, and meet in the folder as `forked_ranks` says. A layout says which
are the default tensor parallel groups of the process. Layers are built on pairs of ranks, and given other values on each pair; what a rank has
is compared with its share of what the same layer does on one rank with the values of its pair.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import json
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megacpp_overlays

# isort: split
import torch
from forked_ranks import on_ranks as forked
from shared_keys import Core, apart, bits, ranks_of

ID = "explicit-tp-groups"
LATENT = "megatron.core.transformer.multi_latent_attention"
LLAVA = "megatron.core.models.multimodal.llava_model"
PREDICTION = "megatron.core.transformer.multi_token_prediction"
HIDDEN, HEADS, RANK, WIDTH, ROTARY = 16, 4, 8, 6, 4
TOKENS, BATCH, RANKS, PAIR = 8, 2, 4, 2
PAIRS = {"crossed": ([0, 2], [1, 3]), "default": ([0, 1], [2, 3]), "wide": ([0, 1], [2, 3]), "narrow": ([0, 1], [2, 3])}
DEFAULTS = {"crossed": 2, "default": 2, "wide": 4, "narrow": 1}
"""How many ranks that follow each other are a default group."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A layer, and how it is built."""

    kind: str
    fused: bool = False
    sequence: bool = False


WAYS = {
    "cross attention": Way("cross"),
    "cross attention, sequence parallel": Way("cross", sequence=True),
    "latent attention": Way("latent"),
    "latent attention, sequence parallel": Way("latent", sequence=True),
    "latent attention, fused": Way("latent", fused=True),
    "latent attention, fused, sequence parallel": Way("latent", fused=True, sequence=True),
    "combined embeddings": Way("llava", sequence=True),
    "predictions": Way("prediction"),
    "layers": Way("block"),
}


def groups_of(group: Any, alone: Any) -> Any:
    """Return a collection of groups with that one for tensor parallelism, and of one rank for all else."""
    module = importlib.import_module("megatron.core.process_groups_config")
    kind = getattr(module, "ProcessGroupCollection", None) or module.ModelCommProcessGroups
    found = kind()
    for name in ("cp", "pp", "dp", "dp_cp", "ep", "tp_cp", "embd"):
        setattr(found, name, alone)
    found.tp = group
    return found


def common(way: Way, ranks: int) -> dict[str, Any]:
    return {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": ranks,
        "sequence_parallel": way.sequence and ranks > 1,
        "use_cpu_initialization": True,
    }


def given(groups: Any) -> dict[str, Any]:
    """Return groups under the name that a release knows them by."""
    return {"model_comm_pgs" if type(groups).__name__.startswith("ModelComm") else "pg_collection": groups}


class Scaled(Core):
    """A core attention that is given no scale."""

    def __init__(self, **_: Any) -> None:
        super().__init__(softmax_scale=0.5)


def cross(way: Way, groups: Any) -> Any:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import CrossAttention, CrossAttentionSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    parts = CrossAttentionSubmodules(
        linear_q=ColumnParallelLinear,
        linear_kv=ColumnParallelLinear,
        core_attention=Scaled,
        linear_proj=RowParallelLinear,
    )
    config = TransformerConfig(**common(way, groups.tp.size()))
    return CrossAttention(config, parts, layer_number=1, **given(groups))


def latent(way: Way, groups: Any) -> Any:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    module = importlib.import_module(LATENT)
    ranks = groups.tp.size()
    config = MLATransformerConfig(
        **common(way, ranks),
        q_lora_rank=RANK,
        kv_lora_rank=RANK,
        qk_head_dim=WIDTH,
        qk_pos_emb_head_dim=ROTARY,
        v_head_dim=WIDTH,
        rope_type="rope",
        apply_rope_fusion=False,
        **({"transformer_impl": "local"} if hasattr(MLATransformerConfig, "transformer_impl") else {}),
    )
    down = ColumnParallelLinear
    downs = {"linear_qkv_down_proj": down} if way.fused else {"linear_q_down_proj": down, "linear_kv_down_proj": down}
    parts = module.MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_up_proj=ColumnParallelLinear,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=ModuleSpec(module=Core),
        linear_proj=RowParallelLinear,
        q_layernorm=IdentityOp,
        kv_layernorm=IdentityOp,
        **downs,
    )
    kind = getattr(module, "FusedMLASelfAttention" if way.fused else "MLASelfAttention")
    return kind(config, parts, layer_number=1, **given(groups))


class Combined(torch.nn.Module):
    """Embeddings of text and pictures that a real LLaVA model shares out over its language model's ranks, behind a weight."""

    def __init__(self, way: Way, groups: Any) -> None:
        super().__init__()
        ranks = groups.tp.size()
        model = importlib.import_module(LLAVA).LLaVAModel
        self.weight = torch.nn.Parameter(torch.ones(HIDDEN, HIDDEN))
        holder = SimpleNamespace(
            pre_process=True,
            post_process=False,
            context_parallel_lm=1,
            sequence_parallel_lm=way.sequence,
            tensor_model_parallel_size_lm=ranks,
            tp_comm_overlap_lm=False,
            **given(groups),
        )
        self.share = lambda values: model._process_embedding_token_parallel(holder, values, None, None, None)[0]

    def forward(self, values: Any, *_: Any, **__: Any) -> Any:
        return self.share(values @ self.weight), None


def llava(way: Way, groups: Any) -> Any:
    return Combined(way, groups)


class Layer(torch.nn.Module):
    """A layer of a prediction head."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.layer_number = 1
        self.weight = torch.nn.Parameter(torch.ones(HIDDEN, HIDDEN))

    def forward(self, hidden_states: Any, **_: Any) -> Any:
        return (hidden_states @ self.weight).tanh(), None


RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "distribute_saved_activations": True,
}


class Predicting(torch.nn.Module):
    """A real prediction layer that recomputes itself and shares out what it saves."""

    def __init__(self, way: Way, groups: Any) -> None:
        super().__init__()
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear
        from megatron.core.transformer.transformer_config import TransformerConfig

        class Norm(torch.nn.Module):
            def __init__(self, **_: Any) -> None:
                super().__init__()

            def forward(self, values: Any) -> Any:
                return torch.nn.functional.layer_norm(values, values.shape[-1:])

        module = importlib.import_module(PREDICTION)
        config = TransformerConfig(
            **common(way, groups.tp.size()),
            mtp_num_layers=1,
            **RECOMPUTED,
        )
        kind = module.MultiTokenPredictionLayerSubmodules
        inner = "mtp_model_layer" if "mtp_model_layer" in kind.__dataclass_fields__ else "transformer_layer"
        parts = kind(enorm=Norm, hnorm=Norm, eh_proj=ColumnParallelLinear, layer_norm=Norm, **{inner: Layer})
        self.layer = module.MultiTokenPredictionLayer(config, parts, layer_number=1, **given(groups))
        self.train()

    def forward(self, values: Any, *_: Any, **__: Any) -> Any:
        tokens = torch.arange(TOKENS)[None].repeat(BATCH, 1)
        return self.layer(
            input_ids=tokens,
            position_ids=tokens,
            hidden_states=values,
            attention_mask=None,
            embedding=lambda input_ids, position_ids: values.detach() * 0.5,
        )


def prediction(way: Way, groups: Any) -> Any:
    return Predicting(way, groups)


class Stack(torch.nn.Module):
    """A real block of one layer that recomputes itself and shares out what it saves."""

    def __init__(self, way: Way, groups: Any) -> None:
        super().__init__()
        from megatron.core.transformer.spec_utils import ModuleSpec
        from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
        from megatron.core.transformer.transformer_config import TransformerConfig

        config = TransformerConfig(**common(way, groups.tp.size()), **RECOMPUTED)
        layers = TransformerBlockSubmodules(layer_specs=[ModuleSpec(module=Layer)], layer_norm=None)
        self.layer = TransformerBlock(config, layers, post_layer_norm=False, **given(groups))
        self.train()

    def forward(self, values: Any, *_: Any, **__: Any) -> Any:
        return self.layer(hidden_states=values, attention_mask=None), None


def block(way: Way, groups: Any) -> Any:
    return Stack(way, groups)


BUILDERS = {"block": block, "cross": cross, "latent": latent, "llava": llava, "prediction": prediction}


def fused_sizes(name: str, size: int) -> list[int]:
    """Return the sizes of what is fused in a weight, each of which is shared out by itself."""
    return [RANK, RANK + ROTARY] if name == "linear_qkv_down_proj.weight" else [size]


def is_whole(name: str) -> bool:
    """Return whether each rank has all of a weight."""
    return name == "weight" or name.rpartition(".")[0].endswith(("mtp_model_layer", "transformer_layer", "layers.0"))


def share(name: str, whole: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """Return what a rank has of a weight or its gradient."""
    if is_whole(name):
        return whole
    parts = whole.split(fused_sizes(name, whole.shape[0]))
    return torch.cat([each.chunk(ranks, dim=int(name == "linear_proj.weight"))[rank] for each in parts])


def fill(layer: Any, group: Any) -> None:
    """Give a layer its share of weights that depend on their names alone."""
    generator = torch.Generator().manual_seed(44)
    ranks = group.size()
    with torch.no_grad():
        for name, each in sorted(layer.named_parameters(), key=lambda found: found[0]):
            whole_on = 1 if is_whole(name) else ranks
            axis = int(name == "linear_proj.weight")
            shape = [size * (whole_on if number == axis else 1) for number, size in enumerate(each.shape)]
            each.copy_(share(name, torch.randn(*shape, generator=generator) * 0.4, ranks, group.rank()))


def step(way: Way, groups: Any, pair: int) -> dict[str, torch.Tensor]:
    """Run a layer forwards and backwards on the values of a pair, and return what its parameters and inputs learn."""
    group = groups.tp
    layer = BUILDERS[way.kind](way, groups)
    fill(layer, group)
    generator = torch.Generator().manual_seed(45 + pair)
    hidden, states, weights = (torch.randn(TOKENS, BATCH, HIDDEN, generator=generator) for _ in range(3))
    is_cut = way.sequence and group.size() > 1

    def cut(values: torch.Tensor) -> torch.Tensor:
        return values.chunk(group.size())[group.rank()].clone() if is_cut else values.clone()

    hidden = (hidden.clone() if way.kind == "llava" else cut(hidden)).requires_grad_()
    found = layer(hidden, None, key_value_states=cut(states)) if way.kind == "cross" else layer(hidden, None)
    output = found[0]
    weights = cut(weights)
    if output.shape == weights.shape:
        (output * weights).sum().backward()
    else:
        output.sum().backward()
    return {
        "output": output.detach(),
        "hidden": hidden.grad,
        **{name: each.grad for name, each in layer.named_parameters()},
    }


def expected(way: Way, name: str, true: torch.Tensor, group: Any) -> torch.Tensor:
    """Return what a rank has of what one rank has."""
    if name == "hidden" and way.kind == "llava":
        return true
    if name in {"output", "hidden"}:
        return true.chunk(group.size())[group.rank()] if way.sequence else true
    return share(name, true, group.size(), group.rank())


def compared(way: Way, groups: Any, pair: int, true: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return how far what this rank has is from what one rank has."""
    found = step(way, groups, pair)
    wanted = {name: expected(way, name, each, groups.tp) for name, each in true.items()}
    return {
        "output": apart(found["output"], wanted["output"]),
        "gradients": max(apart(found[name], wanted[name]) for name in wanted if name != "output"),
        "bits": bits(*found.values()),
    }


def on_rank(number: int, layout: str, names: list[str]) -> dict[str, Any]:
    """Return what one of the ranks measures in a layout."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.set_num_threads(1)
    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()  # of GPUs alone
    alone = [torch.distributed.new_group([each]) for each in range(RANKS)][number]
    pairs = PAIRS[layout]
    pair = next(index for index, ranks in enumerate(pairs) if number in ranks)
    with ranks_of(1):
        true = {name: step(WAYS[name], groups_of(alone, alone), pair) for name in names}
    with ranks_of(DEFAULTS[layout]):
        from megatron.core import parallel_state

        made = [torch.distributed.new_group(ranks) for ranks in pairs]
        group = parallel_state.get_tensor_model_parallel_group() if layout == "default" else made[pair]
        report = {name: compared(WAYS[name], groups_of(group, alone), pair, true[name]) for name in names}
        torch.distributed.barrier()
    return report


def names_for() -> list[str]:
    """Return the ways that a release can go."""
    latents, pictures, predictions = (importlib.import_module(name) for name in (LATENT, LLAVA, PREDICTION))
    fused = getattr(latents, "FusedMLASelfAttention", None)
    code = fused and fused._qkv_down_projection
    layer = predictions.MultiTokenPredictionLayer
    forward, recomputed = (
        inspect.signature(each).parameters for each in (layer.forward, getattr(layer, "_checkpointed_forward", print))
    )
    can = {
        "fused": code is not None and "get_pg_size" in getattr(code, "__wrapped__", code).__code__.co_names,
        "llava": not {"pg_collection", "model_comm_pgs"}.isdisjoint(inspect.signature(pictures.LLaVAModel).parameters),
        "prediction": "tp_group" in inspect.getsource(layer.__init__)  # it has a group of its own
        and not (
            "padding_mask" in forward and "hidden_states" in recomputed and "padding_mask" not in recomputed
        ),  # 0.18 raises
    }
    return [name for name, way in WAYS.items() if can["fused"] or not way.fused if can.get(way.kind, True)]


def prepare() -> list[str]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")
    module = importlib.import_module(LATENT)
    if not isinstance(getattr(module, "TELinear", None), type):
        vars(module).update(HAVE_TE=False)
        if hasattr(module, "Linear"):
            module.Linear = importlib.import_module("megatron.core.post_training.modelopt.layers").Linear
    numbers = importlib.import_module("megatron.core.tensor_parallel.random")
    vars(numbers).update(_get_cuda_rng_state=lambda *_, **__: None, _set_cuda_rng_state=lambda *_, **__: None)
    for name in (LLAVA, PREDICTION, "megatron.core.transformer.attention"):
        importlib.import_module(name)
    return names_for()


def main() -> None:
    """Answer on standard output."""
    folder, *layouts = sys.argv[1:]
    names = prepare()
    records = [each for each in megacpp_overlays.audit().records if each.overlay.id == ID]
    report: dict[str, Any] = {
        "decisions": {each.overlay.target.module: [each.decision.value, each.reason] for each in records}
    }
    for state in os.environ.get("STATES", "on off").split():
        report[state] = {
            layout: forked(
                RANKS, Path(folder, f"{state}-{layout}"), lambda number, layout=layout: on_rank(number, layout, names)
            )
            for layout in layouts
        }
        if records:
            megacpp_overlays.undo(ID)
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
