"""Features of models of the transformers library, read from `config.json`, which describes the layers of a model and not its training.

A key turns a feature on, and then it counts more than the type of the model. Only a type that is known to lack a feature rules it out.

Source: the configuration classes of transformers 5.23.0
"""

from __future__ import annotations

from collections.abc import Mapping

from megacpp_overlays.concerns.configuration import Configuration, Vocabulary

_PLAIN = frozenset(
    {
        "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2",
        "gpt_neox", "gpt_oss", "granite", "granitemoe", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama", "mistral", "mixtral", "nemotron",
        "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
        "stablelm", "starcoder2",
    }
)  # fmt: skip
"""Types of decoders with attention alone, neither multi-latent nor with a choice of keys, as in `_SPARSE`."""
_LATENT = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_k2",
        "longcat_flash",
        "minicpm3",
    }
)
"""Types of decoders with multi-latent attention in every layer."""
_SPARSE = frozenset({"deepseek_v32", "glm_moe_dsa"})
"""Types whose attention is sparse: each query chooses its keys."""
_MAMBA2 = frozenset({"bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"})
"""Types with Mamba-2 layers in addition to attention that is not latent."""
_GATED_DELTA = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
"""Types with gated delta nets in addition to attention that is not latent."""
_EXPERTS = frozenset({"gpt_oss", "mixtral"})
"""Types of `_PLAIN` with a mixture of experts whose name does not say so; without a key they have the number of their class."""
_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
"""Keys for the number of experts."""


def is_config(data: Mapping[str, object]) -> bool:
    """Return whether a mapping is the configuration of a model of transformers, by its `model_type` or `architectures`."""
    return isinstance(data.get("model_type"), str) or isinstance(data.get("architectures"), list)


def from_mapping(data: Mapping[str, object], origin: str) -> Configuration:
    """Return the configuration of a model; for a model with several parts, that of its `text_config`.

    Without a `model_type` nothing is decided. The type of a text part decides nothing; its keys do.
    """
    text = data.get("text_config")
    inner = text if isinstance(text, Mapping) else data
    kind = inner.get("model_type")
    decided = _of_keys(inner) if isinstance(kind, str) else {}
    if isinstance(kind, str) and kind in _PLAIN | _LATENT | _MAMBA2 | _GATED_DELTA and inner is data:
        decided = {**_of_type(kind, inner), **decided}
    return Configuration(origin=origin, vocabulary=Vocabulary.TRANSFORMERS, decided=decided)


def _of_type(kind: str, data: Mapping[str, object]) -> dict[str, bool]:
    has_mamba = kind in _MAMBA2
    found = {
        "mla": kind in _LATENT,
        "dsa": kind in _SPARSE,
        "mamba": has_mamba,
        "mamba3": False,
        "gated_delta": kind in _GATED_DELTA,
        "attention_sinks": kind == "gpt_oss",
    }
    if not has_mamba:
        found["mamba_mixer"] = False
    if kind in _PLAIN | _LATENT:
        found["hybrid"] = False
    if kind in _PLAIN and "moe" not in kind and not any(key in data for key in _COUNTS):
        found["experts"] = kind in _EXPERTS
    return found


def _of_keys(data: Mapping[str, object]) -> dict[str, bool]:
    """Return the features that a key turns on."""
    found: dict[str, bool] = {}
    if _is_count(data.get("kv_lora_rank")):
        found["mla"] = True
    if _is_count(data.get("index_topk")):
        found["dsa"] = True
    if any(_is_count(data.get(key), above=1) for key in _COUNTS):
        found["experts"] = True
    if _is_count(data.get("num_nextn_predict_layers")):
        found["mtp"] = True
    if _is_count(data.get("moe_latent_size")):
        found["latent_experts"] = True
    if _is_count(data.get("linear_num_value_heads")):
        found["gated_delta"] = True
    pattern = data.get("hybrid_override_pattern")
    if isinstance(pattern, str) and "M" in pattern:
        found["mamba"] = found["hybrid"] = True
    return found


def _is_count(value: object, above: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > above
