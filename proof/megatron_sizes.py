"""Sizes of Megatron's model on a CPU and on GPUs, and the needs of a launch there."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from processes import ON_CPU

STAND_INS = Path(__file__).resolve().parent / "on_cpu"
WITHOUT_KERNELS = Path(__file__).resolve().parent / "without_kernels"
"""Lets mamba-ssm be imported where it was built without CUDA; its kernels of Mamba-2 are Triton's."""
SPARSE = (
    *("--multi-latent-attention", "--experimental-attention-variant", "dsa", "--dsa-indexer-loss-coeff", "0.01"),
    "--no-dsa-indexer-rotate-activation",  # Megatron takes it from a package that has to be compiled
)
"""DeepSeek sparse attention over absorbed latent attention."""
REST = (
    *("--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall"),
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.01"),
    *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--position-embedding-type", "rope"),
    *("--untie-embeddings-and-output-weights", "--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-rope-fusion", "--no-persist-layer-norm"),
    *("--bf16", "--mock-data", "--tokenizer-type", "NullTokenizer", "--num-workers", "0"),
    *("--lr-decay-style", "constant"),
    *("--eval-iters", "0", "--eval-interval", "1000", "--log-interval", "1"),
)
"""Arguments that do not depend on the layers: experts, numbers, data, and logging."""
LOCAL = ("--transformer-impl", "local")
ANYWHERE = ("--spec", "local_stack", "hybrid_stack_spec", *LOCAL, *SPARSE, *REST)
"""DeepSeek sparse attention over absorbed latent attention, an MLP and experts, in Megatron's local modules."""

EVERYWHERE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Megatron asks for it under tensor parallelism."""


@dataclass(frozen=True)
class Sizes:
    """A model, and where it is trained."""

    host: str
    pattern: str
    """Of the layers, as Megatron writes it."""
    arguments: tuple[str, ...]
    steps: int
    saved: int
    """The step after which a checkpoint is saved."""
    devices: int
    env: Mapping[str, str]
    path: tuple[Path, ...] = ()
    """Folders that come first on Python's path."""
    rounds: Mapping[str, str] = field(default_factory=dict)
    """Variables with which stock computes the same and rounds otherwise; none where there are no such."""


SEQUENCE = 4096


def sizes(*, quick: bool) -> Sizes:
    """Return the model for the GPUs that there are, or for the CPU."""
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return _on_gpus(devices, quick=quick) if devices else _on_cpu(quick=quick)


def _on_cpu(*, quick: bool) -> Sizes:
    """Some seconds of two cores a launch."""
    pattern = "D-E"
    return Sizes(
        host="cpu",
        pattern=pattern,
        arguments=(
            *(
                "--distributed-backend",
                "gloo",
                "--no-bias-swiglu-fusion",
                *ANYWHERE,
                "--lr",
                "1e-3",
                "--min-lr",
                "1e-4",
            ),
            *("--hybrid-layer-pattern", pattern, "--hidden-size", "64", "--num-attention-heads", "4"),
            *("--seq-length", "64", "--max-position-embeddings", "64", "--vocab-size", "255"),
            *("--micro-batch-size", "2", "--global-batch-size", "4", "--num-experts", "4"),
            *("--q-lora-rank", "32", "--kv-lora-rank", "64", "--qk-head-dim", "16"),
            *("--qk-pos-emb-head-dim", "16", "--v-head-dim", "16"),
            *("--dsa-indexer-n-heads", "4", "--dsa-indexer-head-dim", "32", "--dsa-indexer-topk", "16"),
        ),
        steps=6 if quick else 20,
        saved=3 if quick else 10,
        devices=2,
        # No interpreter: where it is off, kernels of this project for CPU tensors are PyTorch in blocks.
        env={**ON_CPU, **EVERYWHERE, "TRITON_INTERPRET": "0", "TORCHDYNAMO_DISABLE": "1"},
        path=(STAND_INS,),
    )


def _on_gpus(devices: int, *, quick: bool) -> Sizes:
    """Channels of absorbed attention as DeepSeek has them, 64 heads of the indexer, 4096 tokens."""
    with_mamba = all(importlib.util.find_spec(name) for name in ("mamba_ssm", "einops"))
    pattern = "MD-ME" if with_mamba else "D-E"
    return Sizes(
        host="gpu",
        pattern=pattern,
        arguments=(
            *(*ANYWHERE, *(("--disable-mamba-mem-eff-path",) if with_mamba else ())),
            # With 1e-3 at once a model of this size is thrown about, and a rounding becomes another loss in three steps.
            *("--lr", "1e-4", "--min-lr", "1e-5", "--lr-warmup-fraction", "0.25"),
            *("--hybrid-layer-pattern", pattern, "--hidden-size", "2048", "--num-attention-heads", "16"),
            *("--seq-length", str(SEQUENCE), "--max-position-embeddings", str(SEQUENCE), "--vocab-size", "32767"),
            *("--micro-batch-size", "1", "--global-batch-size", "2", "--num-experts", "8"),
            *("--q-lora-rank", "512", "--kv-lora-rank", "512", "--qk-head-dim", "128"),
            *("--qk-pos-emb-head-dim", "64", "--v-head-dim", "128"),
            *("--dsa-indexer-n-heads", "64", "--dsa-indexer-head-dim", "128", "--dsa-indexer-topk", "2048"),
        ),
        steps=6 if quick else 20,
        saved=3 if quick else 10,
        devices=devices,
        env=EVERYWHERE,
        rounds={"TORCHDYNAMO_DISABLE": "1"},  # Megatron compiles chains of small operations into one
        path=() if importlib.util.find_spec("selective_scan_cuda") else (WITHOUT_KERNELS,),
    )
