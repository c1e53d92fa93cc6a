"""Megatron's norms on two tensor parallel ranks: do finalized gradients of their weights say what those on one rank say?

A real `MLASelfAttention` with a norm of its queries, or a real `GatedDeltaNet` with its output norm, runs forwards and backwards on one rank, and
then on two, which are forked and meet with gloo, without sequence parallelism. The norm is Megatron's own of torch. Then the real
`finalize_model_grads` runs. Of the delta net, which then also takes a few steps, replicas are compared, too.

Flash Linear Attention needs a GPU, so the delta net takes Megatron's own rule of torch, which `deterministic_mode` asks for, and
the normalisation of its queries and keys is written out here.
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
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent

MODULE = "megatron.core.distributed.finalize_model_grads"
ATTENTION = "megatron.core.transformer.multi_latent_attention"
NETS = ("megatron.core.ssm.gated_delta_net.common", "megatron.core.ssm.gated_delta_net")
LAYERS = "megatron.core.post_training.modelopt.layers"
HIDDEN, HEADS, TOKENS, RANKS = 16, 4, 8, 2
LATENT, WIDTH, ROTARY = 8, 6, 4
STEPS, RATE = 5, 1e-3
TOLERANCE = 1e-4
"""Relative, of the largest value. Ranks add in another order than one does: fp32 rounding, 1e-6."""


def _queries() -> Behaviour:
    return _run(_attention(), "q_layernorm.weight", "kv_layernorm.weight")


def _outputs() -> Behaviour:
    return _run(_net(), "out_norm.weight")


def _run(build: Callable[[int], Any], *names: str) -> Behaviour:
    finalizer = importlib.import_module(MODULE)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_on_rank, args=(finalizer, build, names, rank, folder)) for rank in range(RANKS)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]
    said = [f"{name} has {' and '.join(f'{each[name][1]:.4f}' for each in found)} times its gradient" for name in names]
    drift = max(each["drift"] for each in found)
    return Behaviour(
        broken=drift > TOLERANCE or any(each[name][0] > TOLERANCE for each in found for name in names),
        seen=f"on {RANKS} ranks {', '.join(said)}; replicas are {drift:.1e} apart after {STEPS} steps",
    )


def _on_rank(finalizer: Any, build: Callable[[int], Any], names: tuple[str, ...], rank: int, folder: str) -> None:
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    with _on_cpu():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
        true = _gradients(finalizer, build(1), 1)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
        module = build(RANKS)
        found = _gradients(finalizer, module, RANKS)
        report: dict[str, Any] = {name: [_apart(found[name], true[name]), _times(found[name], true[name])] for name in names}
        report["drift"] = _drift(finalizer, module, names)
    Path(folder, str(rank)).write_text(json.dumps(report))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _apart(found: Any, true: Any) -> float:
    return float((found - true).abs().max() / true.abs().max())


def _times(found: Any, true: Any) -> float:
    """Return the length of a gradient along the true one."""
    return float((found * true).sum() / (true * true).sum())


def _drift(finalizer: Any, module: Any, names: tuple[str, ...]) -> float:
    """Take some steps, and return how far replicas of norms are from each other then."""
    import torch

    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for _ in range(STEPS):
        _gradients(finalizer, module, RANKS)
        optimizer.step()
    apart = []
    for name in names:
        mine = module.get_parameter(name).detach()
        both = [torch.empty_like(mine) for _ in range(RANKS)]
        torch.distributed.all_gather(both, mine)
        apart.append(_apart(both[0], both[1]))
    return max(apart)


def _gradients(finalizer: Any, module: Any, ranks: int) -> dict[str, Any]:
    """Run forwards and backwards, finalize gradients as a training step does, and return them."""
    import torch

    class Model(torch.nn.Module):  # type: ignore[misc]
        """What the finalizer asks of a model whose data parallel ranks are one."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.config, self.ddp_config = module, module.config, _Nothing()

        def finish_grad_sync(self, **_: Any) -> None:
            """There is one data parallel rank."""

    generator = torch.Generator().manual_seed(2)
    hidden, weights = (torch.randn(TOKENS, 1, HIDDEN, generator=generator) for _ in range(2))
    module.zero_grad()
    output, _ = module(hidden, None)
    (output * weights).sum().backward()
    finalizer.finalize_model_grads([Model()])
    return {name: each.grad.clone() for name, each in module.named_parameters()}


class _Nothing:
    """Has False for whatever is asked."""

    def __getattr__(self, name: str) -> bool:
        return False


def _attention() -> Callable[[int], Any]:
    """Return what builds a multi-latent attention that has its share of the same weights, whatever the number of ranks."""
    module = _imported(ATTENTION)
    if not isinstance(getattr(module, "TELinear", None), type):
        module.Linear = importlib.import_module(LAYERS).Linear if hasattr(module, "Linear") else None
        module.HAVE_TE = False  # 0.16.1 says that it has Transformer Engine's layers, and has mocks

    def build(ranks: int) -> Any:
        import torch
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.spec_utils import ModuleSpec
        from megatron.core.transformer.torch_norm import WrappedTorchNorm
        from megatron.core.transformer.transformer_config import MLATransformerConfig

        class Core(torch.nn.Module):  # type: ignore[misc]
            def __init__(self, softmax_scale: float, **_: Any) -> None:
                super().__init__()
                self.scale = softmax_scale

            def forward(self, query: Any, key: Any, value: Any, _mask: Any, **_: Any) -> Any:
                scores = torch.einsum("sbhd,tbhd->bhst", query, key) * self.scale
                scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
                return torch.einsum("bhst,tbhv->sbhv", scores.softmax(-1), value).flatten(2)

        config = MLATransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            q_lora_rank=LATENT,
            kv_lora_rank=LATENT,
            qk_head_dim=WIDTH,
            qk_pos_emb_head_dim=ROTARY,
            v_head_dim=WIDTH,
            qk_layernorm=True,
            rope_type="rope",
            apply_rope_fusion=False,
            **_common(ranks),
            **({"transformer_impl": "local"} if hasattr(MLATransformerConfig, "transformer_impl") else {}),
        )
        submodules = module.MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=ModuleSpec(module=Core),
            linear_proj=RowParallelLinear,
            q_layernorm=WrappedTorchNorm,
            kv_layernorm=WrappedTorchNorm,
        )
        return _filled(module.MLASelfAttention(config, submodules, layer_number=1), ranks)

    return build


def _net() -> Callable[[int], Any]:
    """Return what builds a gated delta net that has its share of the same weights, whatever the number of ranks."""
    for name in NETS:
        with contextlib.suppress(TargetAbsent):
            module = _imported(name)
            break
    else:
        raise TargetAbsent("there is no gated delta net")
    module.HAVE_FLA = True
    module.l2norm = _normalised

    def build(ranks: int) -> Any:
        import torch
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.torch_norm import WrappedTorchNorm
        from megatron.core.transformer.transformer_config import TransformerConfig

        net = importlib.import_module(NETS[1])
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            linear_conv_kernel_dim=2,
            linear_key_head_dim=WIDTH,
            linear_value_head_dim=WIDTH,
            linear_num_key_heads=HEADS,
            linear_num_value_heads=HEADS,
            normalization="RMSNorm",
            activation_func=torch.nn.functional.silu,
            deterministic_mode=True,
            experimental_attention_variant="gated_delta_net",
            linear_attention_freq=1,
            transformer_impl="local",
            **_common(ranks),
        )
        submodules = module.GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        )
        groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        built = net.GatedDeltaNet(config, submodules, layer_number=1, pg_collection=groups)
        return _filled(built, ranks)

    return build


def _normalised(values: Any, dim: int = -1, eps: float = 1e-6) -> Any:
    return values * (values.square().sum(dim, keepdim=True) + eps).rsqrt()


def _common(ranks: int) -> dict[str, Any]:
    return {
        "add_bias_linear": False,
        "tensor_model_parallel_size": ranks,
        "use_cpu_initialization": True,
    }


def _filled(module: Any, ranks: int) -> Any:
    """Give a module its share of weights that depend on their names alone; what is fused has a share of each part."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, each in sorted(module.named_parameters()):
            axis = int(name in {"linear_proj.weight", "out_proj.weight"})
            shares = 1 if "norm" in name else ranks
            shape = [size * (shares if number == axis else 1) for number, size in enumerate(each.shape)]
            whole = torch.randn(*shape, generator=generator) * 0.4 + ("norm" in name)
            parts = _parts(module, name, whole.shape[0])
            rank = torch.distributed.get_rank() % shares
            each.copy_(torch.cat([part.chunk(shares, axis)[rank] for part in whole.split(parts)]))
    return module


def _parts(module: Any, name: str, size: int) -> list[int]:
    """Return the sizes of what is fused in a weight: queries, keys, values, gates, and two for each head."""
    wide = HEADS * WIDTH
    if name == "in_proj.weight":
        return [wide] * 4 + [HEADS] * 2
    return [wide] * 3 if name.startswith("conv1d.") else [size]


@contextlib.contextmanager
def _on_cpu() -> Any:
    """Make on the CPU what is asked for on a GPU."""
    import torch
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.cuda.current_device = lambda: torch.device("cpu")
    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()  # of GPUs alone
    yield


def _imported(name: str) -> Any:
    """Return a module.

    Raises:
        TargetAbsent: there is none.
    """
    import torch

    warnings.simplefilter("ignore")
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")  # 0.15 compiles something for a GPU as it is imported, and asks for which
    torch.cuda.current_device = lambda: torch.device("cpu")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith(str(error.name)):
            raise
        raise TargetAbsent(f"there is no {name}") from error


def _case(name: str, run: Callable[[], Behaviour]) -> Case:
    return Case(
        name=name, overlay="tp-norm-gradients", device="cpu", versions=("torch",), run=run, targets=(MODULE,)
    )


CASES = (_case("queries-cpu", _queries), _case("outputs-cpu", _outputs))
