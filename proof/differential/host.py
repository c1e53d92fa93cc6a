"""Preparation of a process that runs rows of `table.py`: imports of upstream modules, with PyTorch code in place of GPU kernels.

The kernels for Mamba-2's convolution and scan, and for the normalisation of gated delta nets, do not support float64. All sides of a
comparison run the same PyTorch code instead, because the comparison is not about these kernels.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import itertools
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ON_CPU = os.environ.get("DIFFERENTIAL_ON", "cpu") == "cpu"
MODULES = (
    "megatron.core.distributed",
    "megatron.core.distributed.fsdp.src.megatron_fsdp",
    "megatron.core.dist_checkpointing",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.hybrid.hybrid_model",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.ssm.gated_delta_net",
    "megatron.core.transformer.experimental_attention_variant.dsa",
    "torch._dynamo",
)


@functools.cache
def prepare() -> None:
    """Import the upstream modules, with PyTorch code in place of kernels, and run compiled functions eagerly.

    On a CPU torch gets one thread, and `all_reduce` and `all_to_all_single` are wrapped. Only the first call in a process has an effect.
    """
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "causal_conv1d"):
        _provide(name, __path__=[], __version__="2.3.2" if name.startswith("mamba") else "1.6.0")
    scan = _written_out("megacpp_overlays/kernels/mamba2/packed_reference.py").scan
    _provide("causal_conv1d", causal_conv1d_fn=None)
    _provide("causal_conv1d.causal_conv1d_varlen", causal_conv1d_varlen_states=None)
    _provide("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=_norm_of_groups())
    _provide("mamba_ssm.ops.triton.ssd_combined", mamba_split_conv1d_scan_combined=scan, mamba_chunk_scan_combined=scan)
    _provide_adam()
    import torch

    for name in MODULES:
        importlib.import_module(name)
    net = importlib.import_module("megatron.core.ssm.gated_delta_net.common")
    vars(net).update(HAVE_FLA=True, l2norm=torch.nn.functional.normalize)
    absorbed = importlib.import_module("megatron.core.transformer.experimental_attention_variant.absorbed_mla")
    if not isinstance(absorbed.Linear, type):  # upstream imports the class only with Transformer Engine
        absorbed.Linear = importlib.import_module("megatron.core.post_training.modelopt.layers").Linear
    parallel = importlib.import_module("megatron.core.ssm.mamba_context_parallel")
    vars(parallel).update(tex=SimpleNamespace(thd_get_partitioned_indices=partition), is_te_min_version=lambda _: True)
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    # Names from Transformer Engine, which 0.19.2 uses even where it is not installed.
    if not hasattr(random, "FP8GlobalStateManager"):
        vars(random).update(
            FP8GlobalStateManager=SimpleNamespace(is_fp8_enabled=lambda: False),
            fp8_autocast=lambda **_: contextlib.nullcontext(),
            activation_recompute_forward=lambda **_: contextlib.nullcontext(),
        )
    torch.compiler.set_stance("force_eager")
    if ON_CPU:
        torch.set_num_threads(1)
        torch.distributed.all_reduce = averaging(torch.distributed.all_reduce)
        torch.distributed.all_to_all_single = with_numbers(torch.distributed.all_to_all_single)


def _provide_adam() -> None:
    """Register a module `apex` with an Adam of this file, and `psutil` where it is not installed.

    The state of torch's own Adam cannot be loaded from Megatron's distributed checkpoints.
    """
    import torch

    class FusedAdam(torch.optim.Optimizer):  # type: ignore[misc] # torch is not followed
        def __init__(self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float, **_: Any) -> None:
            super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                for each in group["params"]:
                    if each.grad is None:
                        continue
                    state = self.state[each]
                    for name in ("exp_avg", "exp_avg_sq"):
                        state.setdefault(name, torch.zeros_like(each))
                    adam(each, each.grad, state["exp_avg"], state["exp_avg_sq"], group)

    _provide("apex", __path__=[])
    _provide("apex.optimizers", FusedAdam=FusedAdam, FusedSGD=torch.optim.SGD)
    _provide("apex.multi_tensor_apply", multi_tensor_applier=None)
    if importlib.util.find_spec("psutil") is None:  # the writer of a checkpoint logs its memory use with it
        _provide("psutil", Process=lambda *_: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=0, uss=0)))


def adam(weight: Any, gradient: Any, mean: Any, square: Any, group: dict[str, Any]) -> None:
    """Take one step of Adam in place, with bias correction and without weight decay.

    Args:
        weight: the parameter.
        gradient: its gradient.
        mean: the first moment.
        square: the second moment.
        group: `lr`, `betas`, `eps`, and `step`, which is 1 in the first step.
    """
    first, second = (1 - beta ** group["step"] for beta in group["betas"])
    mean.lerp_(gradient, 1 - group["betas"][0])
    square.lerp_(gradient.square(), 1 - group["betas"][1])
    weight.sub_(group["lr"] * (mean / first) / ((square / second).sqrt() + group["eps"]))


def _norm_of_groups() -> type:
    """Return a substitute for mamba-ssm's gated `RMSNorm`: a norm over groups of channels, without the gate, which `scan` applies."""
    import torch

    class RMSNorm(torch.nn.Module):  # type: ignore[misc] # torch is not followed
        def __init__(self, size: int, eps: float, group_size: int, device: Any, dtype: Any, **_: Any) -> None:
            super().__init__()
            self.eps, self.group_size = eps, group_size
            self.weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=dtype))

        def forward(self, values: Any) -> Any:
            groups = values.unflatten(-1, (-1, self.group_size))
            scaled = groups * (groups.square().mean(-1, keepdim=True) + self.eps).rsqrt()
            return scaled.flatten(-2) * self.weight

    return RMSNorm


def averaging(upstream: Any) -> Any:
    """Return an all-reduce that supports `ReduceOp.AVG`, which gloo lacks: it sums, and divides by the size of the group.

    A call with AVG returns the tensor, and ignores further arguments.
    """
    import torch

    def all_reduce(values: Any, op: Any = torch.distributed.ReduceOp.SUM, group: Any = None, **more: Any) -> Any:
        if op != torch.distributed.ReduceOp.AVG:
            return upstream(values, op=op, group=group, **more)
        upstream(values, group=group)
        return values.div_(torch.distributed.get_world_size(group))

    return all_reduce


def with_numbers(upstream: Any) -> Any:
    """Return an all-to-all that accepts split sizes as tensors too, because Megatron converts only those on a GPU into numbers."""

    def all_to_all_single(output: Any, given: Any, *sizes: Any, **more: Any) -> Any:
        return upstream(output, given, *map(_numbers, sizes), **{name: _numbers(each) for name, each in more.items()})

    return all_to_all_single


def _numbers(given: Any) -> Any:
    return given.tolist() if hasattr(given, "tolist") else given


def partition(bounds: Any, tokens: int, ranks: int, rank: int) -> Any:
    """Return the positions of a rank's tokens in a packed row, (tokens of the rank,), int32.

    This replaces `thd_get_partitioned_indices` of Transformer Engine and has its order. Each document is cut into 2 * ranks chunks, and a
    rank has the chunks `rank` and `2 * ranks - 1 - rank`.

    Args:
        bounds: where documents begin and end in the row, (documents + 1,).
        tokens: ignored.
        ranks: number of context-parallel ranks.
        rank: the rank.
    """
    import torch

    places: list[int] = []
    for start, end in itertools.pairwise(bounds.tolist()):
        chunk = (end - start) // (2 * ranks)
        for number in (rank, 2 * ranks - 1 - rank):
            places += range(start + number * chunk, start + (number + 1) * chunk)
    return torch.tensor(places, dtype=torch.int32, device=bounds.device)


def _provide(name: str, **found: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(found)
    vars(sys.modules.setdefault(name, module)).update(found)


def _written_out(path: str) -> Any:
    """Load a module of this project from its file, because an import of the package would arm all sides, stock too.

    Raises:
        FileNotFoundError: there is no such file.
    """
    spec = importlib.util.spec_from_file_location("written_out", ROOT / path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"there is no {ROOT / path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
