"""Gate for a Megatron whose import initialises CUDA before the launcher has chosen a device."""

from __future__ import annotations

from megacpp_overlays.feature_probes import megatron_cuda_on_import as feature
from megacpp_overlays.model import Gate, Thread

OVERLAY = Gate(
    id="megatron-cuda-on-import",
    pack=20,
    title="a Megatron that asks for the CUDA device while it is imported is installed",
    target=feature.TARGET,
    beside=("torch",),
    probe=feature.probe,
    unsupported={
        feature.WITH_THE_PACKAGE: "call torch.cuda.set_device(LOCAL_RANK) before the first import of megatron, and start workers with spawn or forkserver",
        feature.WITH_HYBRID_MODELS: "call torch.cuda.set_device(LOCAL_RANK) before hybrid models are imported, and start workers with spawn or forkserver",
    },
    symptoms=(
        "every rank takes memory on GPU 0",
        "Cannot re-initialize CUDA in forked subprocess",
        "CUDA is initialised by an import of Megatron",
    ),
    concerns="every model",
    breaks="every rank initialises CUDA on import, asks device 0, and forked workers cannot use CUDA",
    retire_when="no supported Megatron asks for a device while it is imported",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=6538, state="merged 2026-08-17, brought it"),
        Thread(
            repository="NVIDIA/Megatron-LM",
            number=6595,
            state="merged 2026-08-20, made every import of megatron.core reach it",
        ),
    ),
    last_validated="2026-11-21, x86-64 without GPU: main d98e8a64dd asks, 0.19.2 and dev have no such module",
)
