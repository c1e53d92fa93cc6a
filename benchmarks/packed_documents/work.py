"""A small hybrid model of Megatron that is trained on packed documents, each of which has its own answers.

A document draws a value for each of some keys, and is a list of pairs, a key and its value. Where a key comes again, its
value is known, from this document alone: the same key has another value in the document before. These are the answers that
are counted. A row holds many documents; a token that is the same in all of them begins each.

The layers are Mamba-2, attention that sees one document, and an MLP. The mixers take the memory-efficient path, which packed
rows need: on a GPU with mamba-ssm's Triton kernels, on a CPU with a plain scan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from mixer_parameters.work import make_importable, specification, take_one_configuration

PATTERN = "MM*-"
BEGIN = 0
"""The token that begins a document."""
IGNORED = -100


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the model, its documents and its rows are."""

    hidden: int
    state: int
    head: int
    keys: int
    values: int
    pairs: int
    documents: int
    """In a row."""
    chunk: int
    rate: float
    """Of learning."""

    @property
    def document(self) -> int:
        """Tokens of a document."""
        return 1 + 2 * self.pairs

    @property
    def vocabulary(self) -> int:
        """How many different tokens there are."""
        return 1 + self.keys + self.values


GPU = Size(hidden=256, state=64, head=64, keys=16, values=16, pairs=31, documents=64, chunk=64, rate=1e-3)
CPU = Size(hidden=48, state=16, head=16, keys=4, values=4, pairs=11, documents=8, chunk=16, rate=3e-3)


def prepare(device: str) -> None:
    """Let mixers be built and run on this device, and start the one process group that upstream asks for."""
    from megacpp_overlays.kernels.mamba2 import packed_reference

    make_importable()
    package = importlib.import_module("mamba_ssm")
    package.__version__ = importlib.metadata.version("mamba-ssm")  # type: ignore[attr-defined]
    packed_reference.provide_causal_conv1d()
    if device == "cpu":
        torch.cuda.current_device = lambda: torch.device("cpu")
    module = importlib.import_module("megatron.core.ssm.mamba_mixer")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    if device == "cpu":
        module.mamba_split_conv1d_scan_combined = packed_reference.scan  # type: ignore[attr-defined]
        module.MAMBA_HAS_STATE_DTYPE = False  # type: ignore[attr-defined]
        random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    else:
        take_one_configuration()
    backend = "nccl" if device == "cuda" else "gloo"
    meet = f"file://{tempfile.mkdtemp()}/meet"
    torch.distributed.init_process_group(backend, init_method=meet, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


class DocumentAttention(torch.nn.Module):
    """Causal attention within each document: right with and without the overlay, so that mixers alone make the difference."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, *_: Any, packed_seq_params: Any = None, **__: Any) -> Any:
        """Take [tokens, heads, dim] of a packed row, or [tokens, batch, heads, dim]."""
        if packed_seq_params is None:
            parts = [each.permute(1, 2, 0, 3) for each in (query, key, value)]
            return F.scaled_dot_product_attention(*parts, is_causal=True).permute(2, 0, 1, 3).flatten(-2)
        places = torch.arange(query.shape[0], device=query.device)
        bounds = packed_seq_params.cu_seqlens_q[1:].long()
        document = torch.searchsorted(bounds, places, right=True)
        seen = (document[:, None] == document) & (places[:, None] >= places)
        parts = [each.transpose(0, 1)[None] for each in (query, key, value)]
        return F.scaled_dot_product_attention(*parts, attn_mask=seen)[0].transpose(0, 1).flatten(-2)


def model(size: Size, device: str, seed: int) -> Any:
    """Return a model in fp32 whose numbers depend on the seed alone."""
    import warnings

    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = TransformerConfig(
            num_layers=len(PATTERN),
            hidden_size=size.hidden,
            num_attention_heads=4,
            ffn_hidden_size=2 * size.hidden,
            mamba_state_dim=size.state,
            mamba_head_dim=size.head,
            mamba_num_groups=1,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            normalization="RMSNorm",
            add_bias_linear=False,
            masked_softmax_fusion=False,  # its kernels come with apex
            use_cpu_initialization=device == "cpu",
            params_dtype=torch.float32,
        )
    torch.manual_seed(seed)
    if device == "cuda":
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(seed)
    made = HybridModel(
        config,
        specification(DocumentAttention, rmsnorm=False, chunk_size=size.chunk),
        size.vocabulary,
        2**16,
        hybrid_layer_pattern=PATTERN,
    )
    return made.to(device)


def documents(size: Size, count: int, seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return documents and their answers, both [count, tokens]; IGNORED where a token has no answer."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(size.values, (count, size.keys), generator=generator)
    keys = torch.randint(size.keys, (count, size.pairs), generator=generator)
    answers = values.gather(1, keys)
    again = (keys[:, :, None] == keys[:, None, :]).tril(-1).any(-1)
    tokens = torch.full((count, size.document), BEGIN)
    tokens[:, 1::2] = 1 + keys
    tokens[:, 2::2] = 1 + size.keys + answers
    wanted = torch.full((count, size.document), IGNORED)
    wanted[:, 1::2] = torch.where(again, 1 + size.keys + answers, IGNORED)
    return tokens.to(device), wanted.to(device)


def packed(size: Size, device: str, *, told: bool = False) -> Any:
    """Return the boundaries of a row, as from a caller that gives `total_tokens` only if `told`."""
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.arange(size.documents + 1, dtype=torch.int32, device=device) * size.document
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=size.document,
        max_seqlen_kv=size.document,
        **({"total_tokens": size.document * size.documents} if told else {}),
    )


def answer(trained: Any, tokens: torch.Tensor, wanted: torch.Tensor, params: Any = None) -> SimpleNamespace:
    """Return the mean loss of the answers, and how many of them are right.

    Args:
        trained: a model.
        tokens: documents, [documents, tokens]; with `params` they are put into one row.
        wanted: their answers, of the same shape.
        params: the boundaries of the row.
    """
    if params is not None:
        tokens, wanted = tokens.reshape(1, -1), wanted.reshape(1, -1)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    logits = trained(tokens, positions, None, packed_seq_params=params).float()
    counted = wanted != IGNORED
    loss = F.cross_entropy(logits[counted], wanted[counted])
    right = (logits[counted].argmax(-1) == wanted[counted]).float().mean()
    return SimpleNamespace(loss=loss, right=float(right))


@contextlib.contextmanager
def held_still(trained: Any) -> Iterator[None]:
    """Evaluate a model without gradients."""
    trained.eval()
    with torch.no_grad():
        yield
    trained.train()
