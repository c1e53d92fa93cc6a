"""A small hybrid model of the Megatron that is first on the path, on the CPU or on a GPU, without Transformer Engine.

For scripts that run in an interpreter of their own: building a model makes process groups and seeds generators.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import math
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

if (_mamba := importlib.util.find_spec("mamba_ssm")) is not None:
    # Its package imports transformers and compiled kernels of Mamba-1, which the mixer here does not use.
    _package = ModuleType("mamba_ssm")
    _package.__path__ = list(_mamba.submodule_search_locations or ())
    _package.__version__ = importlib.metadata.version("mamba-ssm")  # type: ignore[attr-defined]
    sys.modules["mamba_ssm"] = _package

# isort: split
from megatron.core.models.hybrid import hybrid_model as upstream

VOCABULARY, SEQUENCE, BATCH, HIDDEN = 48, 12, 2, 32
if not torch.cuda.is_available():
    torch.cuda.current_device = lambda: "cpu"  # upstream's local attention makes its buffer there
STAND_IN = (Path(upstream.__file__).parents[4] / "STAND_IN").is_file()


class Norm(torch.nn.LayerNorm):
    """A norm as upstream makes them. Upstream's own one refuses sequence parallelism, for its gradients' sake."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype, device=_device())


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def groups(rank: int = 0, ranks: int = 1, meet: str | None = None, backend: str = "gloo") -> None:
    """Make the process groups that upstream wants, with all ranks in one tensor-parallel group."""
    meet = meet or str(Path(tempfile.mkdtemp(), "meet"))
    torch.distributed.init_process_group(backend, init_method=f"file://{meet}", rank=rank, world_size=ranks)
    if not STAND_IN:
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)


def seed(number: int) -> None:
    """Seed every generator, those of tensor parallelism where there is a GPU."""
    torch.manual_seed(number)
    if not STAND_IN and torch.cuda.is_available():
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(number)


def make(
    pattern: str = "*-*-",
    *,
    impl: str | None = "linear",
    tie: bool = False,
    model_class: Any = None,
    stages: dict[str, bool] | None = None,
    sizes: dict[str, int] | None = None,
    **config: Any,
) -> Any:
    """Return a model with weights that depend on the seed alone.

    Args:
        pattern: upstream's letters for layers; a part after a slash is a head of multi-token prediction.
        impl: `cross_entropy_fusion_impl`, or None for a loss that is not fused.
        tie: whether the output layer has the weight of the embedding.
        model_class: `HybridModel` unless said otherwise.
        stages: `pre_process` and `post_process`.
        sizes: `vocabulary`, `sequence`, `hidden` where they are others than those of this module.
        config: fields of upstream's config.
    """
    seed(7)
    at = {"vocabulary": VOCABULARY, "sequence": SEQUENCE, "hidden": HIDDEN, **(sizes or {})}
    fused = {} if impl is None else {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": impl}
    heads = pattern.count("/")
    settings = {"num_layers": len(pattern.split("/")[0]), "mtp_num_layers": heads or None, **fused, **config}
    model_class = model_class or upstream.HybridModel
    return model_class(
        config=_config(hidden_size=at["hidden"], **settings),
        hybrid_stack_spec=_spec(),
        vocab_size=at["vocabulary"],
        max_sequence_length=at["sequence"],
        hybrid_layer_pattern=pattern,
        share_embeddings_and_output_weights=tie,
        **(stages or {}),
    )


def take_one_configuration() -> None:
    """Let each tuned kernel of mamba-ssm use one configuration: to search takes longer than the rest of a test."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("mamba_ssm.ops.triton"):
            continue
        for kernel in vars(module).values():
            while kernel is not None and not hasattr(kernel, "configs"):
                kernel = getattr(kernel, "fn", None)  # a decorator around the tuner
            if len(getattr(kernel, "configs", ())) > 1:
                kernel.configs = [min(kernel.configs, key=_plainness)]


def _plainness(configuration: Any) -> tuple[int, int, int, str]:
    """Return a key that is least for small blocks, which fit every GPU, then for few stages and four warps."""
    blocks = math.prod(value for value in configuration.kwargs.values() if isinstance(value, int))
    return blocks, configuration.num_stages, abs(configuration.num_warps - 4), str(configuration.kwargs)


def let_the_cpu_compute_the_loss() -> None:
    """Let the dispatcher choose for a Hopper GPU that is not there, and its portable entry take CPU tensors.

    With the overlay of pack 10 the kernels run as they are, without it upstream refuses.
    """
    from megatron.core.fusions import fused_linear_cross_entropy

    from megacpp_overlays.kernels.linear_cross_entropy import entry

    made_up: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (9, 0),
    }
    with mock.patch.multiple("torch.cuda", **made_up), contextlib.suppress(ValueError):
        fused_linear_cross_entropy._get_platform()
    entry._check_devices = lambda **tensors: None


def inputs(labels_from: int = 0, **sizes: int) -> dict[str, torch.Tensor]:
    """Return the inputs of a step: tokens, positions, mask and labels."""
    at = {"vocabulary": VOCABULARY, "sequence": SEQUENCE, "batch": BATCH, **sizes}
    device = _device()
    generator = torch.Generator().manual_seed(11 + labels_from)
    shape = (at["batch"], at["sequence"])
    tokens = torch.randint(0, at["vocabulary"], shape, generator=generator).to(device)
    later = torch.ones(1, 1, at["sequence"], at["sequence"], dtype=torch.bool, device=device).triu(1)
    return {
        "input_ids": tokens,
        "position_ids": torch.arange(at["sequence"], device=device).expand(shape),
        "attention_mask": later,
        "labels": tokens.roll(-1, dims=1),
    }


def _config(**settings: Any) -> Any:
    defaults = {"num_attention_heads": 4, "use_cpu_initialization": _device() == "cpu", "params_dtype": torch.float32}
    settings = {**defaults, "hidden_dropout": 0.0, "attention_dropout": 0.0, **settings}
    if STAND_IN:
        return upstream._config(**settings)
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(**settings)


def _spec() -> Any:
    """Return a stack of upstream's own local modules; Transformer Engine's norm is replaced where it is not there."""
    if STAND_IN:
        return None
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, random
    from megatron.core.transformer import multi_token_prediction as mtp
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    hybrid_block.TENorm = Norm
    if not torch.cuda.is_available():  # its generators are those of a GPU
        random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    head = mtp.MultiTokenPredictionLayerSubmodules(
        enorm=Norm,
        hnorm=Norm,
        eh_proj=ColumnParallelLinear,
        mtp_model_layer=None,
        layer_norm=Norm,
    )
    heads = mtp.MultiTokenPredictionBlockSubmodules(
        layer_specs=[ModuleSpec(module=mtp.MultiTokenPredictionLayer, submodules=head)]
    )
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    causal = {"attn_mask_type": AttnMaskType.causal}
    return ModuleSpec(
        module=hybrid_block.HybridStack,
        submodules=hybrid_block.HybridStackSubmodules(
            mamba_layer=ModuleSpec(
                module=MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=Norm,
                    mixer=ModuleSpec(module=MambaMixer, submodules=mixer),
                    mamba_bda=get_bias_dropout_add,
                ),
            ),
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=Norm,
                    self_attention=ModuleSpec(module=SelfAttention, params=causal, submodules=attention),
                    self_attn_bda=get_bias_dropout_add,
                ),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=Norm,
                    mlp=ModuleSpec(module=MLP, submodules=mlp),
                    mlp_bda=get_bias_dropout_add,
                ),
            ),
            mtp_block_spec=ModuleSpec(module=mtp.MultiTokenPredictionBlock, submodules=heads),
        ),
    )
