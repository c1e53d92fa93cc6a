"""Hybrid models of Megatron dev with `cross_entropy_fusion_impl="linear"`: does the first step run, and is it right?

A small model of attention, MLP and, on a GPU, Mamba layers, once with the fused loss and once without, from the same
weights: losses and every gradient are compared. The layers are upstream's own without Transformer Engine. On the CPU,
where upstream's dispatcher has no kernels, a plain PyTorch loss stands for them: the wiring is the same.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

_MODEL, _LINEAR = "megatron.core.models.hybrid.hybrid_model", "megatron.core.transformer.linear_cross_entropy"
_CPU_TOLERANCE = 1e-5
"""Largest relative error (Frobenius norm) of a float32 loss or gradient: sums in another order, and nothing else."""
_BF16_LOSS = 1e-4
"""The same of a loss in bfloat16, against one that makes its logits in float32, as the fused loss does."""
_BF16_SLACK, _BF16_FLOOR = 1.5, 2e-3
"""How much further from that model a gradient may be than one of the model that is not fused, which rounds its logits: the
layers below round both, in different directions. The floor is half a unit of bfloat16."""
_GPU_MAJORS = (8, 9, 12)
_CLASSES, _WIDTH = 32000, 512

Step = tuple[Any, dict[str, Any]]
"""Losses and gradients."""


def _cpu() -> Behaviour:
    sizes = {"hidden_size": 32, "num_attention_heads": 4}
    seen, errors, worst = [], [], 0.0
    with _one_process("cpu"):
        core = _given_kernels()
        for pattern in ("*-*-", "*-*-/*-"):
            plain = _step(pattern, sizes, 48, 12, None)
            try:
                fused = _step(pattern, sizes, 48, 12, "linear")
            except (UnboundLocalError, TypeError) as error:
                errors.append(f"{pattern}: the fused step ends in {type(error).__name__}: {error}")
                continue
            loss, gradient = _error(fused[0], plain[0]), max(_errors(fused, plain).values())
            worst = max(worst, loss, gradient)
            seen.append(f"{pattern}: loss {loss:.1e}, gradients {gradient:.1e}")
    if errors:
        return Behaviour(broken=True, seen="; ".join(errors))
    calls = len(core.calls)
    text = f"relative errors against the loss that is not fused, {'; '.join(seen)}; the fused loss ran {calls} times"
    return Behaviour(broken=worst > _CPU_TOLERANCE or not calls, seen=f"{text}; tolerance {_CPU_TOLERANCE:.0e}")


def _cuda() -> Behaviour:
    import torch

    if (major := torch.cuda.get_device_capability()[0]) not in _GPU_MAJORS:
        raise Blocked(f"compute capability {major} has kernels of upstream's own")
    main = _with_mamba("M-M*")
    sizes = {"hidden_size": _WIDTH, "num_attention_heads": 8, "params_dtype": torch.bfloat16, "bf16": True}
    seen, errors, broken = [], [], False
    with _one_process("cuda"):
        for pattern in (main, f"{main}/*-"):
            true, plain = (_step(pattern, sizes, _CLASSES, 512, impl) for impl in ("exact", None))
            try:
                fused = _step(pattern, sizes, _CLASSES, 512, "linear")
            except (UnboundLocalError, TypeError) as error:
                errors.append(f"{pattern}: the fused step ends in {type(error).__name__}: {error}")
                continue
            loss, (ours, theirs) = _error(fused[0], true[0]), (_errors(each, true) for each in (fused, plain))
            further = max(ours[name] / (_BF16_SLACK * theirs[name] + _BF16_FLOOR) for name in theirs)
            broken |= not (loss <= _BF16_LOSS and further <= 1)
            seen.append(
                f"{pattern}: loss {loss:.1e} (not fused {_error(plain[0], true[0]):.1e}), worst gradient "
                f"{max(ours.values()):.1e} ({max(theirs.values()):.1e})"
            )
    if errors:
        return Behaviour(broken=True, seen="; ".join(errors))
    text = f"capability {major}, bfloat16, {_CLASSES} classes, relative errors against logits in float32"
    return Behaviour(broken=broken, seen=f"{text}, {'; '.join(seen)}; tolerance of the loss {_BF16_LOSS:.0e}")


def _step(pattern: str, sizes: dict[str, Any], classes: int, tokens: int, impl: str | None) -> Step:
    """Return losses and gradients of one step of a new model, whose weights depend on a seed alone.

    Args:
        pattern: upstream's letters for layers; what follows a slash is a head of multi-token prediction.
        sizes: fields of upstream's config.
        classes: of the vocabulary.
        tokens: in each of two sequences.
        impl: `linear`, None for a loss that is not fused, or `exact` for one that makes its logits in float32.
    """
    import torch

    device = "cuda" if "params_dtype" in sizes else "cpu"
    torch.manual_seed(11)
    if device == "cuda":
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(11)
    model = _model(pattern, sizes, classes, tokens, impl, device)
    if impl == "exact":
        _make_logits_in_float32(model.output_layer)
    given = torch.randint(0, classes, (2, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    later = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=device).triu(1)
    positions = torch.arange(tokens, device=device).expand(2, -1)
    losses = model(given, positions, later, labels=given.roll(-1, 1))
    losses.float().mean().backward()
    return losses.detach().float(), {name: each.grad for name, each in model.named_parameters()}


def _make_logits_in_float32(layer: Any) -> None:
    import torch

    def forward(hidden: Any, weight: Any = None, runtime_gather_output: Any = None) -> tuple[Any, None]:
        weight = layer.weight if weight is None else weight
        return torch.nn.functional.linear(hidden.float(), weight.float()), None

    layer.forward = forward


def _errors(found: Step, true: Step) -> dict[str, float]:
    return {name: _error(found[1][name], slope) for name, slope in true[1].items()}


def _error(found: Any, true: Any) -> float:
    return float((found.double() - true.double()).norm() / true.double().norm())


def _model(pattern: str, sizes: dict[str, Any], classes: int, tokens: int, impl: str | None, device: str) -> Any:
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer import TransformerConfig

    main, *heads = pattern.split("/")
    fused = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": impl} if impl == "linear" else {}
    mamba = {"mamba_state_dim": 32, "mamba_head_dim": 32, "mamba_num_groups": 1, "use_mamba_mem_eff_path": False}
    config = TransformerConfig(
        num_layers=len(main),
        mtp_num_layers=len(heads) or None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=device == "cpu",
        **(mamba if "M" in main else {}),
        **sizes,
        **fused,
    )
    return HybridModel(config, _stack(device), classes, tokens, hybrid_layer_pattern=pattern).to(device)


def _stack(device: str) -> Any:
    """Return the specification of a stack of upstream's own local modules."""
    import torch
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import multi_token_prediction as mtp
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    class Norm(torch.nn.LayerNorm):  # type: ignore[misc]
        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
            super().__init__(hidden_size, eps, dtype=config.params_dtype, device=device)

    hybrid_block.TENorm = Norm
    column, row = ColumnParallelLinear, RowParallelLinear
    head = mtp.MultiTokenPredictionLayerSubmodules(
        enorm=Norm, hnorm=Norm, eh_proj=column, mtp_model_layer=None, layer_norm=Norm
    )
    attention = SelfAttentionSubmodules(linear_qkv=column, core_attention=DotProductAttention, linear_proj=row)
    add = get_bias_dropout_add
    mixer = ModuleSpec(module=MambaMixer, submodules=MambaMixerSubmodules(in_proj=column, out_proj=row))
    mamba = MambaLayerSubmodules(norm=Norm, mixer=mixer, mamba_bda=add)
    attends = ModuleSpec(
        module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
    )
    attending = TransformerLayerSubmodules(input_layernorm=Norm, self_attention=attends, self_attn_bda=add)
    mlp = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row))
    heads = mtp.MultiTokenPredictionBlockSubmodules(
        layer_specs=[ModuleSpec(module=mtp.MultiTokenPredictionLayer, submodules=head)]
    )
    layers = hybrid_block.HybridStackSubmodules(
        mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attending),
        mlp_layer=ModuleSpec(
            module=MLPLayer, submodules=TransformerLayerSubmodules(pre_mlp_layernorm=Norm, mlp=mlp, mlp_bda=add)
        ),
        mtp_block_spec=ModuleSpec(module=mtp.MultiTokenPredictionBlock, submodules=heads),
    )
    return ModuleSpec(module=hybrid_block.HybridStack, submodules=layers)


def _with_mamba(pattern: str) -> str:
    """Return the pattern, or the same without Mamba layers where mamba-ssm is not installed."""
    spec = importlib.util.find_spec("mamba_ssm")
    if spec is not None:
        # The package imports transformers and compiled kernels of Mamba-1, which the layers here do not use.
        package = ModuleType("mamba_ssm")
        package.__path__ = list(spec.submodule_search_locations or ())
        package.__version__ = importlib.metadata.version("mamba-ssm")  # type: ignore[attr-defined]
        sys.modules["mamba_ssm"] = package
    from megatron.core.ssm import mamba_mixer

    if not mamba_mixer.HAVE_MAMBA_SSM:
        return pattern.replace("M", "*")
    for name, module in list(sys.modules.items()):
        if name.startswith("mamba_ssm.ops.triton"):
            for kernel in vars(module).values():
                _take_one_configuration(kernel)
    return pattern


def _take_one_configuration(kernel: Any) -> None:
    """Let a tuned kernel use one configuration: to search takes longer than the rest, and changes no number."""
    while kernel is not None and not hasattr(kernel, "configs"):
        kernel = getattr(kernel, "fn", None)  # a decorator around the tuner
    if len(getattr(kernel, "configs", ())) > 1:
        kernel.configs = [min(kernel.configs, key=lambda each: (each.num_stages, abs(each.num_warps - 4)))]


@contextlib.contextmanager
def _one_process(device: str) -> Iterator[None]:
    """Make the groups of one process, and take them down."""
    import torch

    for name in (_LINEAR, _MODEL):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:  # noqa: PERF203 - which of the two is missing, is what is asked
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise TargetAbsent(f"there is no module {error.name}") from error
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    if device == "cpu":  # upstream's local attention asks a GPU for its buffer and its generators
        torch.cuda.current_device = lambda: "cpu"
        random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1
        )
        try:
            parallel_state.initialize_model_parallel()
            yield
        finally:
            torch.distributed.destroy_process_group()


def _given_kernels() -> Any:
    """Put plain PyTorch in the place of the kernels that the dispatcher would choose; return what counts its calls."""
    import torch
    from megatron.core.fusions import fused_linear_cross_entropy as dispatcher

    calls: list[int] = []

    def losses(hidden: Any, weight: Any, labels: Any, *_: Any) -> Any:
        logits = hidden.flatten(0, -2) @ weight.t()
        return torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="none")

    def forward(hidden: Any, weight: Any, labels: Any, *rest: Any) -> Any:
        calls.append(labels.numel())
        nothing = torch.zeros(1)
        return losses(hidden, weight, labels), nothing, nothing, nothing, 0, 1, hidden

    def backward(slope: Any, hidden: Any, weight: Any, labels: Any, *rest: Any) -> Any:
        with torch.enable_grad():
            leaves = [each.detach().requires_grad_() for each in (hidden, weight)]
            return torch.autograd.grad(losses(*leaves, labels), leaves, slope)

    core = SimpleNamespace(forward_func=forward, backward_func=backward, calls=calls)
    answer: Callable[[], Any] = lambda: core  # noqa: E731 - it takes the place of a function
    dispatcher.LinearCrossEntropy.forward.__globals__["_get_platform"] = answer
    return core


_OVERLAY = "hybrid-linear-ce"
_VERSIONS = ("megatron-core", "mamba-ssm", "torch", "triton")
CASES = (
    Case(name="cpu-float32", overlay=_OVERLAY, device="cpu", versions=_VERSIONS, run=_cpu),
    Case(name="gpu-bfloat16", overlay=_OVERLAY, device="cuda", versions=_VERSIONS, run=_cuda),
)
