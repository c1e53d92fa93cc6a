"""A small model of Megatron whose attention is sparse, absorbed and latent, and its training in several ways.

Layers are those of the proof's stack (`proof/launchers/local_stack.py`): Megatron's AbsorbedMLASelfAttention around its DSAttention and
DSAIndexer, with Megatron's and PyTorch's linear layers in the places of Transformer Engine's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timing
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proof/launchers"))

NOISE = 0.1
"""The share of tokens that the token before them does not decide."""


@dataclass(frozen=True)
class Size:
    """The model, its data and its training."""

    layers: int
    hidden: int
    heads: int
    latent: int
    """Channels of a value, which a key has, too."""
    rotary: int
    """Channels that a key has in addition to these."""
    query: int
    """Channels of the compressed query; not as many as `hidden`."""
    indexer_heads: int
    indexer: int
    """Channels of each."""
    chosen: int
    """Keys of a query."""
    tokens: int
    vocabulary: int
    steps: int


@dataclass(frozen=True)
class Way:
    """How a model is trained."""

    name: str
    overlays: bool = False
    backend: str = "none"
    dtype: torch.dtype = torch.bfloat16
    reordered: bool = False
    """Whether the channels of hidden states are in another order: the same function, whose sums run in another order."""


TRUTH = Way("stock, float32", dtype=torch.float32)
STOCK = Way("stock")
WAYS = (
    TRUTH,
    STOCK,
    Way("stock, again"),
    Way("stock, channels in another order", reordered=True),
    Way("stock, tilelang", backend="tilelang"),
    Way("overlays", overlays=True),
)


def runs_here(way: Way, size: Size, device: str) -> bool:
    """Return whether the backend of a way is installed, and takes the size."""
    if way.backend == "none":
        return True
    takes = device == "cuda" and (size.latent + size.rotary, size.latent) == (576, 512)
    return takes and importlib.util.find_spec("tilelang") is not None


@contextlib.contextmanager
def one_rank(device: str) -> Iterator[None]:
    """Be the only rank, on a device; Megatron asks for the current device of CUDA, which on a CPU is answered by the CPU."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    torch.backends.cuda.matmul.allow_tf32 = False
    if device == "cpu":
        torch.cuda.current_device = lambda: torch.device("cpu")
        random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    store = torch.distributed.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)  # port 0: whichever is free
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        if device == "cuda":
            random.model_parallel_cuda_manual_seed(1)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def model(size: Size, way: Way, device: str, ranks: int = 1) -> Any:
    """Return a model for one of the context-parallel ranks; its weights are to be loaded."""
    from local_stack import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    config = MLATransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=device == "cpu",
        bf16=way.dtype == torch.bfloat16,
        params_dtype=way.dtype,
        experimental_attention_variant="dsa",
        q_lora_rank=size.query,
        kv_lora_rank=size.latent,
        qk_head_dim=min(128, size.latent),
        qk_pos_emb_head_dim=size.rotary,
        v_head_dim=min(128, size.latent),
        rope_type="rope",
        dsa_indexer_n_heads=size.indexer_heads,
        dsa_indexer_head_dim=size.indexer,
        dsa_indexer_topk=size.chosen,
        dsa_indexer_loss_coeff=0.01,
        dsa_indexer_use_sparse_loss=True,
        dsa_indexer_rotate_activation=False,
        context_parallel_size=ranks,
        cp_comm_type="allgather",
    )
    config.dsa_kernel_backend = way.backend
    made = HybridModel(
        config,
        hybrid_stack_spec,
        size.vocabulary,
        size.tokens,
        hybrid_layer_pattern="D" * size.layers,
        position_embedding_type="rope",
    )
    return made.to(device=device, dtype=way.dtype)


def weights(size: Size, device: str) -> dict[str, torch.Tensor]:
    """Return the initial weights of every way: normal numbers that bfloat16 holds, ones in norms."""
    generator = torch.Generator(device).manual_seed(1)
    made = model(size, STOCK, device)
    found = {}
    for name, each in made.named_parameters():
        if each.ndim < 2:
            found[name] = torch.zeros_like(each) if name.endswith("bias") else torch.ones_like(each)
            continue
        # About as much as attention adds to it, or a loss would hardly hear of attention.
        deviation = 0.05 if "embedding" in name else each.size(-1) ** -0.5
        numbers = torch.randn(each.shape, generator=generator, device=device)
        found[name] = (numbers * deviation).to(torch.bfloat16)
    return found


def reordered(start: dict[str, torch.Tensor], size: Size, device: str) -> dict[str, torch.Tensor]:
    """Return the same weights with the channels of hidden states in another order."""
    order = torch.randperm(size.hidden, generator=torch.Generator().manual_seed(2)).to(device)
    found = {}
    for name, each in start.items():
        if name.endswith("linear_proj.weight"):
            found[name] = each[order]
        else:
            found[name] = each[..., order] if each.size(-1) == size.hidden else each
    return found


def documents(size: Size, device: str) -> list[torch.Tensor]:
    """Return a document for each step, (1, tokens + 1): a chain in which one token mostly decides the next."""
    generator = torch.Generator().manual_seed(3)
    successor = torch.randperm(size.vocabulary, generator=generator).tolist()
    made = []
    for _ in range(size.steps):
        row = torch.randint(size.vocabulary, (size.tokens + 1,), generator=generator).tolist()
        is_noise = (torch.rand(size.tokens + 1, generator=generator) < NOISE).tolist()
        for place in range(1, len(row)):
            row[place] = row[place] if is_noise[place] else successor[row[place - 1]]
        made.append(torch.tensor([row], device=device))
    return made


def train(size: Size, way: Way, start: dict[str, torch.Tensor], device: str, rate: float) -> dict[str, Any]:
    """Train a model in one way.

    Weights of all ways are kept in float32, where AdamW updates them; a model in bfloat16 gets them rounded after each step.

    Returns:
        `losses`, `grad_norms` and `indexer_losses` of each step; `ms`, the median of forward and backward of the later half of
        the steps; and `mib`, the peak of memory above weights, gradients' and optimizer's state, None on a CPU.
    """
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper as Helper

    made = model(size, way, device)
    begin = reordered(start, size, device) if way.reordered else start
    learnt = dict(made.named_parameters())
    with torch.no_grad():
        for name, each in learnt.items():
            each.copy_(begin[name])
    masters = [each.detach().float().clone() for each in learnt.values()]
    optimizer = torch.optim.AdamW(masters, lr=rate, weight_decay=0.0)
    seen: list[torch.Tensor] = []
    norms, of_indexer, taken = [], [], []
    held = 0
    for step, document in enumerate(documents(size, device)):
        if step == 1 and device == "cuda":  # the optimizer's state is there
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        Helper.tracker.clear()
        marks = timing.marked((functools.partial(forward, made, document, seen), torch.Tensor.backward), device)
        norms.append(torch.stack([each.grad.float().norm() for each in learnt.values()]).norm())
        of_indexer.append(Helper.tracker["values"].sum())
        for master, each in zip(masters, learnt.values(), strict=True):
            master.grad, each.grad = each.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, each in zip(masters, learnt.values(), strict=True):
                each.copy_(master)
        timing.settle(device)
        taken.append(sum(timing.elapsed_ms(marks)))
    return {
        "losses": torch.stack(seen).tolist(),
        "grad_norms": torch.stack(norms).tolist(),
        "indexer_losses": torch.stack(of_indexer).tolist(),
        "ms": statistics.median(taken[len(taken) // 2 :]),
        "mib": (torch.cuda.max_memory_allocated() - held) / 2**20 if device == "cuda" else None,
    }


def forward(made: Any, document: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of a document, (1, tokens + 1), and put it on a list."""
    positions = torch.arange(document.size(1) - 1, device=document.device)[None]
    loss = made(document[:, :-1], positions, None, labels=document[:, 1:]).float().mean()
    seen.append(loss.detach())
    return loss
