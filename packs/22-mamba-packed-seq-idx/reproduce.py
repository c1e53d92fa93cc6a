"""Megatron's MambaMixer on a packed row: does a document get what it gets alone, where nobody gave `total_tokens`?

A real mixer runs a row of three documents, padded and with tokens behind the last one, forward and backward, and then
each document by itself. With the plain cases the scan is this project's own in PyTorch, so that they run without
mamba-ssm; the others run mamba-ssm's Triton kernels, interpreted or on a GPU. Without causal-conv1d, which is compiled,
the convolution in front of them is plain PyTorch too.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import math
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

MODULE = "megatron.core.ssm.mamba_mixer"
HIDDEN, STATE, HEAD, CHUNK = 16, 16, 16, 16
LENGTHS, PADDED, TAIL = (11, 5, 9), (12, 8, 12), 4
TOLERANCE = 1e-3
"""Relative, of the largest value. Kernels cut a row into other chunks than a document alone: fp32 rounding, 1e-6."""


def _plain() -> Behaviour:
    return _measure("cpu", kernels=False)


def _interpreted() -> Behaviour:
    return _measure("cpu", kernels=True)


def _on_gpu() -> Behaviour:
    return _measure("cuda", kernels=True)


def _measure(device: str, *, kernels: bool) -> Behaviour:
    import torch

    if kernels:
        _import_kernels()
    with _on(device):
        module = importlib.import_module(MODULE)
        mixer = _build(module, device, kernels=kernels)
        starts = [sum(PADDED[:number]) for number in range(len(PADDED) + 1)]
        tokens = starts[-1] + TAIL
        generator = torch.Generator().manual_seed(3)
        row, weights = (torch.randn(tokens, 1, HIDDEN, generator=generator).to(device) for _ in range(2))
        places = [slice(start, start + length) for start, length in zip(starts, LENGTHS, strict=False)]
        in_documents = torch.zeros(tokens, 1, 1, device=device)
        for place in places:
            in_documents[place] = 1
        params = _params(module, device)
        packed = _run(mixer, row, weights * in_documents, params)
        worst = {"outputs": 0.0, "gradients": 0.0}
        for place in places:
            alone = _run(mixer, row[place], weights[place], None)
            for name, one, other in zip(worst, packed, alone, strict=True):
                worst[name] = max(worst[name], _relative(one[place], other))
    words = ", ".join(f"{name} {value:.1e}" for name, value in worst.items())
    what = "mamba-ssm's kernels" if kernels else "a plain scan"
    return Behaviour(
        broken=any(value > TOLERANCE for value in worst.values()),
        seen=f"{len(LENGTHS)} documents in a row of {tokens} tokens, {what} on {device}: relative differences from each "
        f"document alone: {words}",
    )


def _run(mixer: Any, row: Any, weights: Any, params: Any) -> tuple[Any, Any]:
    leaf = row.detach().clone().requires_grad_()
    output, _ = mixer(leaf, packed_seq_params=params)
    (output * weights).sum().backward()
    return output.detach(), leaf.grad


def _relative(found: Any, true: Any) -> float:
    return float((found - true).abs().max() / true.abs().max())


def _params(module: ModuleType, device: str) -> Any:
    """Return the boundaries as a caller gives them who does not say how many tokens the row has.

    Raises:
        TargetAbsent: the mixer of this Megatron takes no packed rows.
    """
    import inspect

    import torch

    if "packed_seq_params" not in inspect.signature(module.MambaMixer.forward).parameters:
        raise TargetAbsent("the mixer takes no packed rows")
    bounds = [
        torch.tensor([sum(lengths[:number]) for number in range(len(lengths) + 1)], dtype=torch.int32, device=device)
        for lengths in (LENGTHS, PADDED)
    ]
    return module.PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds[0],
        cu_seqlens_kv=bounds[0],
        cu_seqlens_q_padded=bounds[1],
        cu_seqlens_kv_padded=bounds[1],
        max_seqlen_q=max(PADDED),
        max_seqlen_kv=max(PADDED),
    )


def _build(module: ModuleType, device: str, *, kernels: bool) -> Any:
    """Return a real mixer in fp32 with trained values.

    Raises:
        Blocked: mamba-ssm is here and cannot be imported.
    """
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megacpp_overlays.kernels.mamba2 import packed_reference

    class Projection(torch.nn.Module):  # type: ignore[misc] # torch is not seen by the type checker
        """A linear layer that answers as Megatron's do, without process groups."""

        def __init__(self, inputs: int, outputs: int, **_: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(outputs, inputs, device=device) / math.sqrt(inputs))
            self.bias = None

        def forward(self, values: Any) -> Any:
            return torch.nn.functional.linear(values, self.weight), None

    names = vars(module)
    names["get_cuda_rng_tracker"] = lambda: SimpleNamespace(fork=contextlib.nullcontext)
    if kernels:
        if not names.get("HAVE_MAMBA_SSM", True):
            raise Blocked("mamba-ssm's kernels cannot be imported here")
        _take_one_configuration(device)
    else:
        names.update(HAVE_MAMBA_SSM=True, HAVE_EINOPS=True, MAMBA_HAS_STATE_DTYPE=False)
        names["mamba_split_conv1d_scan_combined"] = packed_reference.scan
        names["_check_mamba_sequence_packing_support"] = lambda **_: (True, None)
        names.setdefault("rearrange", _rearrange)
        vars(importlib.import_module("megatron.core.ssm.mamba_context_parallel"))["HAVE_EINOPS"] = True
    torch.manual_seed(1)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        mamba_state_dim=STATE,
        mamba_head_dim=HEAD,
        mamba_num_groups=1,
        params_dtype=torch.float32,
    )
    mixer = module.MambaMixer(
        config,
        module.MambaMixerSubmodules(in_proj=Projection, out_proj=Projection),
        HIDDEN,
        rmsnorm=False,
        chunk_size=CHUNK,
        layer_number=1,
        pg_collection=SimpleNamespace(tp=group, cp=group),
    )
    return mixer.to(device)


def _rearrange(values: Any, pattern: str, **_: Any) -> Any:
    """Do what the mixer asks of einops: swap the first two axes of three, or drop the middle one."""
    return values.squeeze(1) if pattern == "d 1 w -> d w" else values.transpose(0, 1)


def _import_kernels() -> None:
    """Import mamba-ssm past its package, which asks for compiled kernels of Mamba-1, and give what is not installed.

    Raises:
        Blocked: mamba-ssm or einops is not installed.
    """
    from megacpp_overlays.kernels.mamba2.packed_reference import provide_causal_conv1d

    for name in ("mamba_ssm", "einops", "triton"):
        if importlib.util.find_spec(name) is None:
            raise Blocked(f"{name} is not installed")
    spec = importlib.util.find_spec("mamba_ssm")
    package = ModuleType("mamba_ssm")
    package.__path__ = list((spec and spec.submodule_search_locations) or ())
    package.__version__ = importlib.metadata.version("mamba-ssm")  # type: ignore[attr-defined]
    sys.modules["mamba_ssm"] = package
    provide_causal_conv1d()


def _take_one_configuration(device: str) -> None:
    """Let each tuned kernel use one configuration: small blocks fit every GPU, large ones are interpreted faster."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("mamba_ssm.ops.triton"):
            continue
        for kernel in vars(module).values():
            while kernel is not None and not hasattr(kernel, "configs"):
                kernel = getattr(kernel, "fn", None)  # a decorator around the tuner
            if len(getattr(kernel, "configs", ())) > 1:
                kernel.configs = [(min if device == "cuda" else max)(kernel.configs, key=_size)]


def _size(configuration: Any) -> tuple[int, int, str]:
    blocks = math.prod(value for value in configuration.kwargs.values() if isinstance(value, int))
    return blocks, configuration.num_stages, str(configuration)


@contextlib.contextmanager
def _on(device: str) -> Iterator[None]:
    """Answer for a GPU that is not there, where there is none: what constructors and kernels ask about theirs."""
    import torch

    instead: Mapping[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "device": contextlib.nullcontext,
        "get_device_properties": lambda *_: SimpleNamespace(multi_processor_count=4),
    }
    before = {name: getattr(torch.cuda, name) for name in instead}
    try:
        for name, value in instead.items() if device == "cpu" else ():
            setattr(torch.cuda, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(torch.cuda, name, value)


def _case(name: str, device: str, run: Any, *versions: str, **environment: str) -> Case:
    return Case(
        name=name,
        overlay="mamba-packed-seq-idx",
        device=device,
        versions=("torch", *versions),
        run=run,
        environment=environment,
    )


_KERNELS = ("mamba-ssm", "causal-conv1d", "triton")

CASES = (
    _case("plain-cpu", "cpu", _plain),
    _case("kernels-cpu", "cpu", _interpreted, *_KERNELS, TRITON_INTERPRET="1"),
    _case("kernels-gpu", "cuda", _on_gpu, *_KERNELS, TRITON_F32_DEFAULT="ieee"),
)
