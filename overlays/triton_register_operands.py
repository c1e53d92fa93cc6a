"""Gate for a Triton with which user kernels may be wrong on Hopper without an error.

It warns only where a GPU of compute capability 9 is known to be present: Triton 3.6.0 comes with torch 2.11, and hosts
without such a GPU are not affected.
"""

from __future__ import annotations

from megacpp_overlays.feature_probes import triton_register_operands as feature
from megacpp_overlays.model import Gate, Thread
from megacpp_overlays.runtime import gpus

OVERLAY = Gate(
    id="triton-register-operands",
    pack=43,
    title="a Triton that gets some products of registers wrong on Hopper is installed",
    target=feature.TARGET,
    beside=(),
    probe=feature.probe,
    elsewhere=gpus.elsewhere(frozenset({9}), known_alone=True),
    unsupported={
        feature.WRITTEN_AGAIN: "for kernels of your own whose tl.dot takes a left operand that was cast, scaled or masked in a pipelined "
        "loop, use 4 warps, or Triton 3.7.0 or newer; kernels of mamba-ssm 2.3.2.post1 (Mamba-2, Mamba-3 SISO) "
        "were right in every configuration of their tuners",
    },
    symptoms=(
        "a Triton kernel is wrong on Hopper with 8 warps",
        "tl.dot gives wrong numbers on H100",
    ),
    concerns="every model",
    breaks="with 8 warps up to half of such a product's numbers are wrong, in every launch, without an error",
    retire_when="every supported Triton is 3.7.0 or newer",
    threads=(
        Thread(
            repository="triton-lang/triton",
            number=9433,
            state="open when last seen 2026-05-28, the hazard by its PTX; its own example is right with the assembler of CUDA 13.3",
        ),
    ),
    last_validated="2026-11-23, H200: 89 kernels as compiled by 3.3.1, 3.4.0, 3.5.1, 3.6.0, 3.7.0, 3.7.1, 3.8.0 and 3.9.0",
)
