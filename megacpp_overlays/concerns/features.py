"""Features of a model and of its run on which overlays bear, and the keys of a configuration that decide each.

Keys are fields of Megatron-Core's configuration classes and arguments of Megatron-LM, as releases 0.12.0 to 0.19.2 have them.
`tests/concerns` holds each field and each default against these releases.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from megacpp_overlays.frozen import NamedTuple


class Criterion(enum.Enum):
    """Condition on the value of a key."""

    TRUE = "is on"
    GIVEN = "is not None"
    COUNT = "is a number above 0"
    SEVERAL = "is a number above 1"
    ONE_OF = "is one of some values"
    HAS = "has one of some words, or letters, in it"
    ABSENT = "is None, or else decides nothing"


class Sign(NamedTuple):
    """A key of a configuration, and the condition on its value by which a feature is on."""

    key: str
    criterion: Criterion
    on: tuple[object, ...] = ()
    """Values with which the feature is on, for `ONE_OF` and `HAS`."""
    off: tuple[object, ...] = ()
    """Values with which the feature is off, for `ONE_OF`; any other value decides nothing."""
    default: tuple[object, ...] = ()
    """Default of the argument in every release of Megatron-LM that has it, as the only item; empty where there is none."""
    of: str = "TransformerConfig"
    """The configuration class that has the field."""


class Feature(NamedTuple):
    """One feature.

    It is on where one sign is, and off where all signs of the vocabulary are off. Without signs in a vocabulary a configuration
    in it does not rule the feature out.
    """

    name: str
    """The word for it in `concerns` of a declaration."""
    title: str
    """Name of the feature in a report, worded so that `no` can precede it."""
    config: tuple[Sign, ...] = ()
    """Signs among fields of Megatron's configuration classes."""
    arguments: tuple[Sign, ...] = ()
    """Signs among arguments of Megatron-LM."""
    shows: tuple[Sign, ...] = ()
    """Signs that show the feature, but do not rule it out where they are off."""
    classes: tuple[str, ...] = ()
    """Classes of modules whose instances are the feature; with `by_class` a model without any does not have it."""
    by_class: bool = False


GPT, HYBRID_PROGRAMS = "pretrain_gpt.py", ("pretrain_hybrid.py", "pretrain_mamba.py")
PROGRAMS = (GPT, *HYBRID_PROGRAMS)
"""Launchers of Megatron-LM, where the arguments alone decide the configuration."""
PROGRAM = "program"
"""Key among the arguments for the name of the launcher."""
PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern", "mtp_hybrid_override_pattern")

_OPTIMIZER, _DDP = "OptimizerConfig", "DistributedDataParallelConfig"
_VARIANTS = ("gated_delta_net", "dsa")


def _switch(name: str, title: str, *keys: str, of: str = "TransformerConfig") -> Feature:
    """Return a feature that is on where one of several fields is, which are arguments of the same name."""
    signs = tuple(Sign(key, Criterion.TRUE, default=(False,), of=of) for key in keys or (name,))
    return Feature(name, title, config=signs, arguments=signs)


def _in_pattern(*letters: str) -> tuple[Sign, ...]:
    return tuple(Sign(key, Criterion.HAS, on=letters, default=(None,)) for key in PATTERNS)


def _variant(chosen: str) -> Sign:
    others = tuple(each for each in _VARIANTS if each != chosen)
    return Sign("experimental_attention_variant", Criterion.ONE_OF, on=(chosen,), off=(None, *others), default=(None,))


_OWN_SPEC = Sign("spec", Criterion.ABSENT, default=(None,))
_IS_GPT = Sign(PROGRAM, Criterion.ONE_OF, off=(GPT,))
_IS_MEGATRON_LM = Sign(PROGRAM, Criterion.ONE_OF, off=PROGRAMS)
_TENSOR = Sign("tensor_model_parallel_size", Criterion.SEVERAL, default=(1,))
_CONTEXT = (
    Sign("context_parallel_size", Criterion.SEVERAL, default=(1,)),
    Sign("hybrid_context_parallel", Criterion.TRUE, default=(False,)),
)
_MTP = Sign("mtp_num_layers", Criterion.COUNT, default=(None,))
_HALF = tuple(Sign(key, Criterion.TRUE, default=(False,)) for key in ("fp16", "bf16"))
_BALANCING, _GLOBAL_BALANCING = (
    Sign("moe_router_load_balancing_type", Criterion.HAS, on=(each,), default=("aux_loss",))
    for each in ("seq_aux_loss", "global_aux_loss")
)
_LATENT_EXPERTS = Sign("moe_latent_size", Criterion.GIVEN, default=(None,))
_Z_LOSS = Sign("moe_z_loss_coeff", Criterion.COUNT, default=(None,))
_LOSS = Sign("cross_entropy_fusion_impl", Criterion.ONE_OF, on=("linear",), off=("native", "te"), default=("native",))
_SINKS = Sign("softmax_type", Criterion.ONE_OF, on=("learnable",), off=("vanilla", "off-by-one"), default=("vanilla",))
_RECOMPUTE = Sign("recompute_granularity", Criterion.GIVEN, default=(None,))
_GRAPHS = (
    Sign(
        "cuda_graph_impl",
        Criterion.ONE_OF,
        on=("local",),
        off=("none", "transformer_engine", "full_iteration"),
        default=("none",),
    ),
    Sign("enable_cuda_graph", Criterion.TRUE, default=(False,)),
)
_FSDP = tuple(Sign(key, Criterion.TRUE, default=(False,), of=_DDP) for key in ("use_megatron_fsdp", "use_custom_fsdp"))
_MUP = Sign("use_mup", Criterion.TRUE, default=(False,))
"""muP sets `softmax_scale`, which is no argument of Megatron-LM."""
_MUON = ("muon", "dist_muon", "adaptive_muon", "dist_adaptive_muon")
_RECIPES = ("te_precision_config_file", "kitchen_config_file", "kitchen_recipe_number")

FEATURES: tuple[Feature, ...] = (
    Feature(
        "mla",
        "multi-latent attention",
        config=(Sign("multi_latent_attention", Criterion.TRUE),),
        arguments=(Sign("multi_latent_attention", Criterion.TRUE, default=(False,)), *_in_pattern("+", "D")),
        classes=("MultiLatentAttention",),
    ),
    Feature(
        "dsa",
        "DeepSeek sparse attention",
        # A hybrid model may have such layers without the variant, and then its indexer has a size.
        config=(_variant("dsa"), Sign("dsa_indexer_topk", Criterion.ABSENT)),
        arguments=(_variant("dsa"), *_in_pattern("D"), _OWN_SPEC),
        classes=("DSAttention",),
    ),
    Feature(
        "gated_delta",
        "gated delta nets",
        shows=(_variant("gated_delta_net"),),  # a hybrid model may have such layers without the variant
        arguments=(_variant("gated_delta_net"), *_in_pattern("G"), _OWN_SPEC),
        classes=("GatedDeltaNet", "GatedDeltaProduct"),
        by_class=True,
    ),
    Feature(
        "hybrid",
        "hybrid model",
        shows=(Sign("is_hybrid_model", Criterion.TRUE), *(Sign(key, Criterion.GIVEN) for key in PATTERNS[:2])),
        arguments=(Sign(PROGRAM, Criterion.ONE_OF, on=HYBRID_PROGRAMS, off=(GPT,)),),
        classes=("HybridModel", "MambaModel"),
        by_class=True,
    ),
    Feature(
        "mamba_mixer",
        "Mamba layers of Megatron",
        arguments=(_IS_GPT, _OWN_SPEC, *_in_pattern("M")),
        classes=("MambaMixer",),
        by_class=True,
    ),
    Feature(
        "mamba", "Mamba-2 layers", arguments=(_IS_GPT, _OWN_SPEC, *_in_pattern("M")), classes=("MambaMixer", "Mamba2")
    ),
    Feature("mamba3", "Mamba-3 layers", arguments=(_IS_GPT, _OWN_SPEC), classes=("Mamba3",)),
    Feature(
        "experts",
        "mixture of experts",
        config=(Sign("num_moe_experts", Criterion.COUNT),),
        arguments=(Sign("num_experts", Criterion.COUNT, default=(None,)),),
    ),
    Feature("latent_experts", "latent mixture of experts", config=(_LATENT_EXPERTS,), arguments=(_LATENT_EXPERTS,)),
    _switch("expert_bias", "bias of experts", "moe_router_enable_expert_bias"),
    Feature("seq_aux_loss", "seq_aux_loss", config=(_BALANCING,), arguments=(_BALANCING,)),
    Feature("global_aux_loss", "global_aux_loss", config=(_GLOBAL_BALANCING,), arguments=(_GLOBAL_BALANCING,)),
    Feature("z_loss", "z-loss of routers", config=(_Z_LOSS,), arguments=(_Z_LOSS,)),
    Feature("mtp", "multi-token prediction", config=(_MTP,), arguments=(_MTP, *_in_pattern("/"))),
    _switch("repeated_mtp", "repeated prediction layer", "mtp_use_repeated_layer"),
    Feature(
        "packed",
        "packed rows",
        shows=tuple(Sign(key, Criterion.TRUE) for key in ("sft", "rl_use_sequence_packing")),
    ),
    Feature(
        "conversations",
        "fine-tuning on conversations",
        arguments=(Sign("sft", Criterion.TRUE, default=(False,)), _IS_MEGATRON_LM),
    ),
    Feature("tensor_parallel", "tensor parallelism", config=(_TENSOR,), arguments=(_TENSOR,)),
    _switch("sequence_parallel", "sequence parallelism"),
    Feature("context_parallel", "context parallelism", config=_CONTEXT, arguments=_CONTEXT),
    Feature(
        "half",
        "fp16 or bf16",
        config=(
            *_HALF,
            Sign("params_dtype", Criterion.ONE_OF, on=("torch.bfloat16", "torch.float16"), off=("torch.float32",)),
        ),
        arguments=_HALF,
    ),
    _switch("per_token_loss", "calculate_per_token_loss", "calculate_per_token_loss"),
    Feature(
        "distributed_optimizer",
        "distributed optimizer",
        config=(Sign("use_distributed_optimizer", Criterion.TRUE, of=_OPTIMIZER), *_FSDP),
        arguments=(Sign("use_distributed_optimizer", Criterion.TRUE, default=(False,)), *_FSDP),
        classes=("DistributedOptimizer",),
    ),
    _switch("optimizer_offload", "optimizer on the CPU", "optimizer_cpu_offload", of=_OPTIMIZER),
    _switch("precision_aware", "precision-aware optimizer", "use_precision_aware_optimizer", of=_OPTIMIZER),
    Feature(
        "layer_wise",
        "layer-wise optimizer",
        config=(Sign("use_layer_wise_distributed_optimizer", Criterion.TRUE, of=_OPTIMIZER),),
        arguments=(Sign("optimizer", Criterion.ONE_OF, on=("dist_muon",), off=("adam", "sgd"), default=("adam",)),),
        classes=("LayerWiseDistributedOptimizer",),
    ),
    Feature(
        "softmax_scale",
        "configured softmax_scale",
        config=(Sign("softmax_scale", Criterion.GIVEN), _MUP),
        arguments=(_MUP,),
    ),
    Feature(
        "muon",
        "Muon",
        config=(Sign("optimizer", Criterion.ONE_OF, on=_MUON, off=("adam", "sgd"), of=_OPTIMIZER),),
        arguments=(Sign("optimizer", Criterion.ONE_OF, on=_MUON, off=("adam", "sgd"), default=("adam",)),),
        classes=("TensorParallelMuon",),
    ),
    Feature(
        "megatron_fsdp",
        "Megatron-FSDP",
        shows=_FSDP,  # it may be used on its own
        arguments=(*_FSDP, _IS_MEGATRON_LM),
        classes=("MegatronFSDP",),
    ),
    Feature(
        "torch_fsdp2",
        "Torch FSDP2",
        arguments=(Sign("use_torch_fsdp2", Criterion.TRUE, default=(False,)), _IS_MEGATRON_LM),
        classes=("TorchFullyShardedDataParallel",),
    ),
    Feature(
        "recompute",
        "recomputation",
        config=(_RECOMPUTE,),
        arguments=(
            _RECOMPUTE,
            *(Sign(key, Criterion.TRUE, default=(False,)) for key in ("recompute_activations", "moe_layer_recompute")),
        ),
    ),
    _switch("fused_residual_norm", "fused_residual_rmsnorm", "fused_residual_rmsnorm"),
    Feature("local_graphs", "local CUDA graphs", config=_GRAPHS, arguments=_GRAPHS),
    Feature("linear_loss", "fused linear cross entropy", config=(_LOSS,), arguments=(_LOSS,)),
    Feature(
        "rope_fusion",
        "fused rotary embeddings",
        config=(Sign("apply_rope_fusion", Criterion.TRUE),),
        arguments=(Sign("apply_rope_fusion", Criterion.TRUE, default=(True,)),),
    ),
    Feature("attention_sinks", "learnable attention sinks", config=(_SINKS,), arguments=(_SINKS,)),
    _switch("qk_clip", "QK clipping"),
    Feature(
        "quant_recipe",
        "quantization recipe",
        config=(Sign("quant_recipe", Criterion.GIVEN),),
        arguments=tuple(Sign(key, Criterion.GIVEN, default=(None,)) for key in _RECIPES),
    ),
    Feature(
        "liger_loss",
        "Liger's loss",
        shows=(Sign("use_liger_kernel", Criterion.TRUE),),
        arguments=(_IS_MEGATRON_LM,),
    ),
)

BY_NAME: Mapping[str, Feature] = {each.name: each for each in FEATURES}
EVERYTHING = "every model"
"""Text of `concerns` in a declaration that concerns every model."""
