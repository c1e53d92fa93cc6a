"""Small models of Megatron's classes, without Transformer Engine, as a row asks for them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from differential.host import partition
from differential.rows import Row
from every_layer_stack import hybrid_stack_spec
from local_stack import Norm
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.experimental_attention_variant import absorbed_mla
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

transformer_engine.TENorm = hybrid_block.TENorm
"""`local_stack` puts its norm into the block; to overlays a name that leads elsewhere than its import is foreign code."""
WORDS, HIDDEN, HEADS, TOKENS, EXPERTS = 32, 16, 4, 16, 4
DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}


class PlainAttention(torch.nn.Module):  # type: ignore[misc] # torch is not followed
    """Causal softmax attention for whole and packed rows and any number of context parallel ranks, in the dtype that it is given."""

    def __init__(
        self, config: Any, *_: Any, softmax_scale: float | None = None, pg_collection: Any = None, **__: Any
    ) -> None:
        super().__init__()
        self.config, self.scale = config, softmax_scale
        self.cp = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(self, query: Any, key: Any, value: Any, *_: Any, packed_seq_params: Any = None, **__: Any) -> Any:
        """Return (tokens, batch, heads * channels), or (tokens, heads * channels) for a packed row."""
        is_packed = query.dim() == 3
        if is_packed:
            query, key, value = (each[:, None] for each in (query, key, value))
        ranks = 1 if self.cp is None else self.cp.size()
        places = [places_of(query.shape[0] * ranks, ranks, rank, packed_seq_params) for rank in range(ranks)]
        mine = places[0 if self.cp is None else self.cp.rank()]
        if self.cp is not None:
            key, value = (
                gather_from_sequence_parallel_region(each.contiguous(), tensor_parallel_output_grad=True, group=self.cp)
                for each in (key, value)
            )
        theirs = torch.cat(places)
        seen = mine[:, None] >= theirs
        if packed_seq_params is not None:
            bounds = _bounds(packed_seq_params).long()
            seen &= torch.bucketize(mine, bounds, right=True)[:, None] == torch.bucketize(theirs, bounds, right=True)
        shared = query.shape[2] // key.shape[2]
        key, value = (each.repeat_interleave(shared, 2) for each in (key, value))
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) * (self.scale or query.shape[-1] ** -0.5)
        shares = scores.float().masked_fill(~seen.to(scores.device), -torch.inf).softmax(-1).to(value.dtype)
        found = torch.einsum("bhst,tbhv->sbhv", shares, value).flatten(2)
        return found[:, 0] if is_packed else found


def _bounds(packed: Any) -> Any:
    return packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded


def places_of(tokens: int, ranks: int, rank: int, packed: Any = None) -> torch.Tensor:
    """Return the places in a whole row of the tokens that a context parallel rank has, in its order."""
    bounds = torch.tensor([0, tokens]) if packed is None else _bounds(packed)
    return partition(bounds, tokens, ranks, rank).long()


def groups_of(row: Row) -> Any:
    """Return the process groups of a model: the default ones, or tensor parallel ones of its own, where by default each rank is alone."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if row.own_groups:
        groups.tp = groups.tp_cp = groups.mp = groups.expt_tp = torch.distributed.group.WORLD
        groups.dp = groups.dp_cp = groups.cp
        groups.embd = groups.pos_embd = None
    return groups


def configured(row: Row) -> Any:
    """Return Megatron's configuration of a row."""
    latent = any(each in row.pattern for each in "+D")
    half = row.dtype if row.dtype in {"float16", "bfloat16"} else None
    layers = row.pattern.partition("/")[0].replace("|", "")
    given: dict[str, Any] = {
        "num_layers": len(layers) if row.model == "hybrid" else len(layers) // 2,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 2 * HIDDEN,
        "num_attention_heads": HEADS,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": DTYPES[row.dtype],
        "pipeline_dtype": DTYPES[row.dtype],
        "fp16": half == "float16",
        "bf16": half == "bfloat16",
        "tensor_model_parallel_size": row.tp,
        "sequence_parallel": row.sequence_parallel,
        "context_parallel_size": row.cp,
        "pipeline_model_parallel_size": row.pp,
        "expert_model_parallel_size": row.ep,
        "use_cpu_initialization": True,
        "transformer_impl": "local",
    }
    if "E" in row.pattern:
        given |= {
            "num_moe_experts": EXPERTS,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": HIDDEN,
            "moe_aux_loss_coeff": 0.1,
            "moe_token_dispatcher_type": "alltoall",
        }
    if "/" in row.pattern:
        given |= {"mtp_num_layers": row.pattern.count("/"), "mtp_loss_scaling_factor": 0.3}
    if "M" in row.pattern:
        given |= {"mamba_state_dim": 8, "mamba_head_dim": 8, "mamba_num_groups": 4}
    if "G" in row.pattern:
        given |= {
            "linear_conv_kernel_dim": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": HEADS,
            "linear_num_value_heads": HEADS,
        }
    if latent:
        given |= {
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_head_dim": 8,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 8,
            "rope_type": "rope",
        }
    if "D" in row.pattern:
        given |= {
            "experimental_attention_variant": "dsa",
            "dsa_indexer_n_heads": 8,  # with few, several keys score exactly 0, and devices choose among them as they like
            "dsa_indexer_head_dim": 8,
            "dsa_indexer_topk": 6,
            "dsa_indexer_loss_coeff": 0.01,
            "dsa_indexer_rotate_activation": False,
        }
    return (MLATransformerConfig if latent else TransformerConfig)(**{**given, **row.config})


def built(row: Row, config: Any, pre_process: bool, post_process: bool) -> Any:
    """Return the model of a row on this rank; a stage of a pipeline has the input or output layer that the arguments ask for."""
    common: dict[str, Any] = {
        "config": config,
        "vocab_size": WORDS,
        "max_sequence_length": 4 * TOKENS,
        "pre_process": pre_process,
        "post_process": post_process,
        "position_embedding_type": "none",
        "pg_collection": groups_of(row),
        **row.build,
    }
    spec = _changed(hybrid_stack_spec, row)
    if row.model == "hybrid":
        cls = _subclass(HybridModel) if row.subclassed else HybridModel
        model = cls(hybrid_stack_spec=spec, hybrid_layer_pattern=row.pattern, **common)
    else:
        cls = _subclass(GPTModel) if row.subclassed else GPTModel
        model = cls(**common, **_gpt_layers(row, spec))
    for name, each in model.named_parameters():
        each.requires_grad_(not any(part in name for part in row.frozen))
        if any(part in name for part in row.in_fp32):
            each.keep_in_fp32 = True  # the mark of Megatron's main branch, which overlays honour
    return model.to(torch.cuda.current_device())


def _gpt_layers(row: Row, spec: Any) -> dict[str, Any]:
    """Return the specifications of a GPT model whose layers are pairs of letters: one mixes tokens, one does not."""
    decoder, *further = row.pattern.split("/")
    stages = decoder.split("|")
    mine = stages[torch.distributed.get_rank(ProcessGroupCollection.use_mpu_process_groups(["pp"]).pp)]
    found: dict[str, Any] = {
        "transformer_layer_spec": TransformerBlockSubmodules(
            layer_specs=[_pair(spec, mine[at : at + 2]) for at in range(0, len(mine), 2)], layer_norm=Norm
        )
    }
    if further and mine is stages[-1]:
        parts = MultiTokenPredictionLayerSubmodules(
            enorm=Norm,
            hnorm=Norm,
            eh_proj=ColumnParallelLinear,
            mtp_model_layer=_pair(spec, further[0]),
            layer_norm=Norm,
        )
        layers = 1 if row.config.get("mtp_use_repeated_layer") else len(further)
        specs = [ModuleSpec(module=MultiTokenPredictionLayer, submodules=parts)] * layers
        found["mtp_block_spec"] = ModuleSpec(
            module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=specs)
        )
    return found


LETTERS = {
    "*": "attention_layer",
    "+": "mla_layer",
    "G": "gdn_layer",
    "D": "dsa_layer",
    "-": "mlp_layer",
    "E": "moe_layer",
}


def _pair(spec: Any, letters: str) -> ModuleSpec:
    """Return one layer of a transformer that mixes as one layer of the hybrid stack does, and computes as another one does."""
    mixing, computing = (getattr(spec.submodules, LETTERS[each]).submodules for each in letters)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=replace(
            mixing, pre_mlp_layernorm=computing.pre_mlp_layernorm, mlp=computing.mlp, mlp_bda=computing.mlp_bda
        ),
    )


def _changed(spec: Any, row: Row) -> Any:
    """Return the specification of a stack with the core attention of a row, norms that it asks for, and subclasses."""
    core = PlainAttention if row.attention == "plain" else None

    def change(each: Any) -> Any:
        if isinstance(each, ModuleSpec):
            module = each.module
            if isinstance(module, type) and row.subclassed:
                module = _subclass(module)
            return ModuleSpec(module=module, params=each.params, submodules=change(each.submodules))
        if is_dataclass(each) and not isinstance(each, type):
            parts = {one.name: change(getattr(each, one.name)) for one in fields(each)}
            if core is not None and isinstance(parts.get("core_attention"), type):
                parts["core_attention"] = core
            if isinstance(
                each, absorbed_mla.AbsorbedMLASelfAttentionSubmodules
            ):  # as upstream's own specification has it
                parts |= dict.fromkeys(("linear_q_down_proj", "linear_kv_down_proj"), absorbed_mla.Linear)
            if row.config.get("qk_layernorm"):
                parts |= {name: Norm for name in ("q_layernorm", "k_layernorm", "kv_layernorm") if name in parts}
            return replace(each, **parts)
        return each

    return change(spec)


def _subclass(cls: type) -> type:
    """Return a subclass that calls super() in its constructor and in `forward`, and does nothing else."""

    def build(self: Any, *given: Any, **named: Any) -> None:
        super(made, self).__init__(*given, **named)

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        return super(made, self).forward(*given, **named)

    made = type(cls.__name__, (cls,), {"__init__": build, "forward": forward})
    return made
