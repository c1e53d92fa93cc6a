"""A small hybrid model of Megatron, without Transformer Engine, that is trained in three ways from the same numbers.

    fp32    every parameter and activation in fp32: the reference
    cast    bf16, as Megatron does it: Float16Module casts everything, A_log and D included
    kept    bf16 with the overlay: A_log and D of the two mixers stay fp32

Two Mamba-2 layers, one of attention and an MLP. The mixers take the path without causal-conv1d, with the Triton kernels
of mamba-ssm, each held to one configuration so that tuning does not take longer than training.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

MODES = ("fp32", "cast", "kept")
EXEMPT = ("A_log", "D")
PATTERN = "M*M-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the model and its data are."""

    hidden: int = 256
    heads: int = 8
    state: int = 64
    vocabulary: int = 256
    length: int = 1024
    batch: int = 8


def make_importable() -> str:
    """Let `mamba_ssm.ops.triton` be imported where the package itself cannot be; return its version.

    The package imports transformers and compiled kernels of Mamba-1, which Mamba-2 does not use. Its kernels multiply
    fp32 numbers as fp32, not as TF32, so that the reference is one.
    """
    import importlib.metadata
    import importlib.util

    spec = importlib.util.find_spec("mamba_ssm")
    if spec is None:
        raise SystemExit("mamba-ssm is not installed")
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    package = ModuleType("mamba_ssm")
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["mamba_ssm"] = package
    return importlib.metadata.version("mamba-ssm")


def take_one_configuration() -> None:
    """Let each tuned kernel of mamba-ssm use one configuration: the one with the smallest blocks and fewest stages.

    It decides how a kernel is laid out on the GPU, and fits into it with fp32 inputs as well.
    """
    for name, module in list(sys.modules.items()):
        if not name.startswith("mamba_ssm.ops.triton"):
            continue
        for kernel in vars(module).values():
            while kernel is not None and not hasattr(kernel, "configs"):
                kernel = getattr(kernel, "fn", None)
            if len(getattr(kernel, "configs", ())) > 1:
                kernel.configs = [min(kernel.configs, key=_smallness)]


def _smallness(configuration: Any) -> tuple[int, int, str]:
    blocks = math.prod(value for value in configuration.kwargs.values() if isinstance(value, int))
    return blocks, configuration.num_stages, str(configuration)


def start(folder: str) -> None:
    """Start one process group of one rank, on the GPU."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)


def specification(core_attention: type | None = None, **mixer: Any) -> Any:
    """Return the specification of a hybrid stack without Transformer Engine.

    Args:
        core_attention: in the place of Megatron's own.
        mixer: further arguments of `MambaMixer`.
    """
    from functools import partial

    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    hybrid_block.TENorm = WrappedTorchNorm  # the last norm of the stack, which no specification names
    in_and_out = MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear)
    attention = ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=core_attention or DotProductAttention,
            linear_proj=RowParallelLinear,
        ),
    )
    mlp = partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(ColumnParallelLinear, RowParallelLinear))
    norm, add = WrappedTorchNorm, get_bias_dropout_add
    return ModuleSpec(
        hybrid_block.HybridStack,
        submodules=hybrid_block.HybridStackSubmodules(
            mamba_layer=ModuleSpec(
                MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=norm, mixer=ModuleSpec(MambaMixer, params=mixer, submodules=in_and_out), mamba_bda=add
                ),
            ),
            attention_layer=ModuleSpec(
                TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=norm, self_attention=attention, self_attn_bda=add
                ),
            ),
            mlp_layer=ModuleSpec(
                MLPLayer, submodules=TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=mlp, mlp_bda=add)
            ),
        ),
    )


class Model:
    """The model in one mode, with Megatron's optimizer, from numbers that a seed or another model's state gives."""

    def __init__(
        self, mode: str, size: Size, *, seed: int, state: dict[str, Any] | None = None, distributed: bool = False
    ) -> None:
        import torch
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.hybrid.hybrid_model import HybridModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import TransformerConfig

        half = mode != "fp32"
        dtype = torch.bfloat16 if half else torch.float32
        config = TransformerConfig(
            num_layers=len(PATTERN),
            hidden_size=size.hidden,
            num_attention_heads=size.heads // 2,
            ffn_hidden_size=2 * size.hidden,
            mamba_state_dim=size.state,
            mamba_head_dim=2 * size.hidden // size.heads,
            mamba_num_groups=1,
            use_mamba_mem_eff_path=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            normalization="RMSNorm",
            add_bias_linear=False,
            masked_softmax_fusion=False,  # its kernels come with apex
            bf16=half,
            params_dtype=dtype,
        )
        model_parallel_cuda_manual_seed(seed)
        torch.manual_seed(seed)
        self.mode, self.distributed = mode, distributed
        self.inner = HybridModel(config, specification(), size.vocabulary, size.length, hybrid_layer_pattern=PATTERN)
        self.inner.cuda()
        if state is not None:
            with torch.no_grad():
                for name, value in self.inner.named_parameters():
                    value.copy_(state[name])
        self.start = {name: value.detach().clone() for name, value in self.inner.named_parameters()}
        if mode == "cast":
            for _, value in self.exempt():
                vars(value).pop("keep_in_fp32", None)  # as if the overlay were off
        wrapped = Float16Module(config, self.inner) if half else self.inner
        kept = {value.dtype for name, value in self.exempt()}
        if kept != {torch.bfloat16 if mode == "cast" else torch.float32}:
            raise SystemExit(f"{mode}: A_log and D are {kept}; is MEGACPP_OVERLAY_FLOAT16_MIXER_PARAMETERS=on?")
        self.model = DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed),
            module=wrapped,
        )
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            weight_decay=0.0,
            clip_grad=1.0,
            bf16=half,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])

    def exempt(self) -> list[tuple[str, Any]]:
        """Return the mixers' `A_log` and `D`, with their names."""
        return [(name, value) for name, value in self.inner.named_parameters() if name.rpartition(".")[2] in EXEMPT]

    def losses(self, tokens: Any) -> Any:
        """Return the loss of each token but the last, in fp32."""
        import torch

        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
        return self.model(inputs, positions, None, labels=labels).float()

    def gradients(self, tokens: Any) -> dict[str, Any]:
        """Return the gradients of `A_log` and `D`, before any clipping."""
        self._backward(tokens)
        return {name: value.main_grad.detach().double().cpu().clone() for name, value in self.exempt()}

    def step(self, tokens: Any) -> float:
        """Train one step; return the loss before it."""
        loss = self._backward(tokens)
        self.optimizer.step()
        return loss

    def sharded(self, *, is_loading: bool, optimizer: bool) -> dict[str, Any]:
        """Return the sharded state of a checkpoint of this model."""
        model = self.inner.sharded_state_dict()
        state = {"model": model}
        if optimizer:
            kind = {"metadata": {"distrib_optim_sharding_type": "dp_reshardable"}} if self.distributed else {}
            state["optimizer"] = self.optimizer.sharded_state_dict(dict(model), is_loading, **kind)
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Load the state of a checkpoint."""
        self.inner.load_state_dict(state["model"])
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            self.optimizer.reload_model_params()

    def masters(self) -> dict[str, Any]:
        """Return the fp32 values of `A_log` and `D` that the optimizer updates."""
        inner = getattr(self.optimizer, "chained_optimizers", [self.optimizer])[0]
        if self.distributed:
            model = [*inner.model_float16_groups, *inner.model_fp32_groups]
            main = [*inner.shard_fp32_from_float16_groups, *inner.shard_fp32_groups]
        else:
            model = [*inner.float16_groups, *inner.fp32_from_fp32_groups]
            main = [*inner.fp32_from_float16_groups, *inner.fp32_from_fp32_groups]
        names = {id(value): name for name, value in self.exempt()}
        pairs = [pair for group in zip(model, main, strict=True) for pair in zip(*group, strict=True)]
        return {names[id(one)]: copy.detach().clone() for one, copy in pairs if id(one) in names}

    def _backward(self, tokens: Any) -> float:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.losses(tokens).mean()
        loss.backward()
        self.model.finish_grad_sync()
        return float(loss.detach())


def tokens(size: Size, *, seed: int, device: Any) -> Any:
    """Return sequences whose second half repeats the first, drawn from a skewed vocabulary: [batch, length + 1].

    The only thing to learn is the token read half a sequence ago, so a state that decays at a wrong rate shows.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    weights = 1.0 / torch.arange(1, size.vocabulary + 1)
    half = torch.multinomial(
        weights.expand(size.batch, -1), size.length // 2 + 1, replacement=True, generator=generator
    )
    return torch.cat([half, half], dim=1)[:, : size.length + 1].to(device)
