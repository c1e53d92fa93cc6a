"""A real MambaMixer of the Megatron that is first on the path, with the real Triton scan, on packed rows.

For scripts that run in an interpreter of their own, with TRITON_INTERPRET=1 where there is no GPU: mamba-ssm is imported
past its own `__init__`, which asks for compiled kernels of Mamba-1, and causal-conv1d, which is compiled too, is given in
plain PyTorch where it is not installed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from upstream_imports import upstream_module

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HIDDEN, STATE, HEAD, GROUPS, CHUNK = 16, 16, 16, 1, 16
"""The smallest that the kernels take, in two heads: to interpret one pass takes seconds."""
WIDTH = 4
"""Of the convolution: the first three tokens of a document would see the one before."""


class Projection(torch.nn.Module):
    """A linear layer that answers as Megatron's do, without process groups."""

    def __init__(self, inputs: int, outputs: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs, device=DEVICE) / inputs**0.5)
        self.bias = None

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.linear(values, self.weight), None


def prepare() -> ModuleType:
    """Import the mixer's module so that it can be built and run on this host; return it."""
    from megacpp_overlays.kernels.mamba2.packed_reference import provide_causal_conv1d

    spec = importlib.util.find_spec("mamba_ssm")
    assert spec is not None, "mamba-ssm is not installed"
    package = ModuleType("mamba_ssm")
    package.__path__ = list(spec.submodule_search_locations or ())
    package.__version__ = importlib.metadata.version("mamba-ssm")  # type: ignore[attr-defined]
    sys.modules["mamba_ssm"] = package
    provide_causal_conv1d()
    if not CUDA:  # the kernels ask their GPU for these before they are interpreted
        torch.cuda.current_device = lambda: torch.device("cpu")
        torch.cuda.device = contextlib.nullcontext  # type: ignore[assignment, misc]
        torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=4)
    module = upstream_module("megatron.core.ssm.mamba_mixer")
    assert module.HAVE_MAMBA_SSM
    module.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=contextlib.nullcontext)  # type: ignore[attr-defined]
    _take_one_configuration()
    return module


def _take_one_configuration() -> None:
    """Let each tuned kernel use one configuration: small blocks and few stages fit every GPU, large ones interpret fast."""
    best = min if CUDA else max
    for name, module in list(sys.modules.items()):
        if not name.startswith("mamba_ssm.ops.triton"):
            continue
        for kernel in vars(module).values():
            while kernel is not None and not hasattr(kernel, "configs"):
                kernel = getattr(kernel, "fn", None)  # a decorator around the tuner
            if len(getattr(kernel, "configs", ())) > 1:
                kernel.configs = [best(kernel.configs, key=_size)]


def _size(configuration: Any) -> tuple[int, int, str]:
    blocks = 1
    for value in configuration.kwargs.values():
        blocks *= value if isinstance(value, int) else 1
    return blocks, configuration.num_stages, str(configuration)


def make(module: ModuleType, cp: Any = None, **options: Any) -> Any:
    """Return a mixer in fp32 whose weights depend on nothing but a seed.

    Args:
        module: the module that `prepare` returned.
        cp: the group of context parallel ranks, one rank alone if not given.
        options: arguments of the mixer's constructor.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=1,
            mamba_state_dim=STATE,
            mamba_head_dim=HEAD,
            mamba_num_groups=GROUPS,
            params_dtype=torch.float32,
        )
    torch.manual_seed(5)
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    submodules = module.MambaMixerSubmodules(in_proj=Projection, out_proj=Projection)
    mixer = module.MambaMixer(
        config,
        submodules,
        HIDDEN,
        chunk_size=CHUNK,
        layer_number=1,
        pg_collection=SimpleNamespace(tp=alone, cp=cp or alone),
        **options,
    )
    return mixer.to(DEVICE)


class Packing(NamedTuple):
    """Documents in one row."""

    lengths: tuple[int, ...]
    padded: tuple[int, ...] | None = None
    """The length of each in the row, if that is more than its tokens."""
    tail: int = 0
    """Tokens behind the last document."""

    @property
    def tokens(self) -> int:
        """The length of the row."""
        return sum(self.padded or self.lengths) + self.tail

    @property
    def starts(self) -> list[int]:
        """Where each document starts."""
        return _bounds(self.padded or self.lengths)[:-1]

    def params(self, module: ModuleType, **fields: Any) -> Any:
        """Return Megatron's description of the row."""
        given: dict[str, Any] = {"cu_seqlens_q": self.lengths, "cu_seqlens_q_padded": self.padded}
        bounds = {
            name: None if lengths is None else torch.tensor(_bounds(lengths), dtype=torch.int32, device=DEVICE)
            for name, lengths in given.items()
        }
        keys = {name.replace("_q", "_kv", 1): value for name, value in bounds.items()}
        longest = max(self.padded or self.lengths)
        return module.PackedSeqParams(
            qkv_format="thd", max_seqlen_q=longest, max_seqlen_kv=longest, **bounds, **keys, **fields
        )

    def row(self, seed: int = 3) -> torch.Tensor:
        """Return activations, [tokens, 1, HIDDEN]; padding and tail are not zero."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.tokens, 1, HIDDEN, generator=generator).to(DEVICE)


def _bounds(lengths: Sequence[int]) -> list[int]:
    bounds = [0]
    for each in lengths:
        bounds.append(bounds[-1] + each)
    return bounds


PACKINGS = {
    "ends of chunks": Packing((CHUNK, 2 * CHUNK)),
    "within chunks": Packing((11, 2, 1, 20)),
    "padded": Packing((9, 13), padded=(12, 16)),
    "tail": Packing((10, 13), tail=6),
    "one document": Packing((19,)),
}


class Pass(NamedTuple):
    """The results of a mixer for a row."""

    output: torch.Tensor
    """[tokens, HIDDEN]."""
    slope: torch.Tensor
    """Gradient of the row, [tokens, HIDDEN]."""
    slopes: dict[str, torch.Tensor]
    """Gradients of the parameters."""


def run(mixer: Any, row: torch.Tensor, weights: torch.Tensor, params: Any = None) -> Pass:
    """Run a mixer forward and backward, with the sum of outputs times weights as the loss."""
    mixer.zero_grad(set_to_none=True)
    leaf = row.detach().clone().requires_grad_()
    output, _ = mixer(leaf, packed_seq_params=params)
    (output * weights).sum().backward()
    slopes = {name: each.grad.clone() for name, each in mixer.named_parameters() if each.grad is not None}
    return Pass(output.detach()[:, 0], leaf.grad[:, 0], slopes)  # type: ignore[index]


def weights_of(packing: Packing) -> torch.Tensor:
    """Return how much each output of a row counts in the loss: padding and tail not at all."""
    weights = torch.randn(packing.tokens, 1, HIDDEN, generator=torch.Generator().manual_seed(9))
    counted = torch.zeros(packing.tokens, 1, 1)
    for start, length in zip(packing.starts, packing.lengths, strict=True):
        counted[start : start + length] = 1
    return (weights * counted).to(DEVICE)


def alone(mixer: Any, packing: Packing) -> Pass:
    """Run each document of a row by itself, and put the results where they are in the row; elsewhere is zero."""
    row, weights = packing.row(), weights_of(packing)
    output, slope = torch.zeros_like(row[:, 0]), torch.zeros_like(row[:, 0])
    slopes: dict[str, torch.Tensor] = {}
    for start, length in zip(packing.starts, packing.lengths, strict=True):
        place = slice(start, start + length)
        found = run(mixer, row[place], weights[place])
        output[place], slope[place] = found.output, found.slope
        slopes = {name: slopes.get(name, 0) + each for name, each in found.slopes.items()}
    return Pass(output, slope, slopes)


def documents_only(packing: Packing, values: torch.Tensor) -> torch.Tensor:
    """Return the rows of a result that belong to documents."""
    places = [
        torch.arange(start, start + length) for start, length in zip(packing.starts, packing.lengths, strict=True)
    ]
    return values[torch.cat(places).to(values.device)]


def apart(found: Pass, true: Pass, packing: Packing) -> dict[str, float]:
    """Return relative differences, in the maximum norm, of outputs, of the row's gradient and of the worst parameter's."""
    pairs = {
        "output": (documents_only(packing, found.output), documents_only(packing, true.output)),
        "slope": (found.slope, true.slope),
    }
    worst = {name: _relative(found.slopes[name], each) for name, each in true.slopes.items()}
    return {name: _relative(*pair) for name, pair in pairs.items()} | {"parameters": max(worst.values())}


def _relative(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true.double()).abs().max() / true.double().abs().max())


def same_bits(one: Pass, other: Pass) -> bool:
    """Return whether two passes agree in every bit."""
    return all(
        torch.equal(a, b)
        for a, b in [
            (one.output, other.output),
            (one.slope, other.slope),
            *((one.slopes[name], each) for name, each in other.slopes.items()),
        ]
    )


@contextlib.contextmanager
def scans(module: ModuleType) -> Iterator[list[Any]]:
    """Collect the `seq_idx` of each scan."""
    real, seen = module.mamba_split_conv1d_scan_combined, list[Any]()

    def scan(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["seq_idx"])
        return real(*args, **kwargs)

    module.mamba_split_conv1d_scan_combined = scan  # type: ignore[attr-defined]
    try:
        yield seen
    finally:
        module.mamba_split_conv1d_scan_combined = real  # type: ignore[attr-defined]
