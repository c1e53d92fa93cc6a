"""Gate for a TileLang with which the Mamba-3 MIMO backward does not compile."""

from __future__ import annotations

from megacpp_overlays.feature_probes import mamba3_mimo_reduce_layout as feature
from megacpp_overlays.model import Gate, Thread

OVERLAY = Gate(
    id="mamba3-mimo-reduce-layout",
    pack=17,
    title="a TileLang that refuses a sum of the Mamba-3 MIMO backward is installed",
    target=feature.TARGET,
    beside=("tilelang",),
    decided_by="tilelang",
    probe=feature.probe,
    unsupported={
        feature.REFUSED: "install tilelang 0.1.8, which mamba-ssm 2.3.2.post1 pins together with apache-tvm-ffi<=0.1.9, or at most 0.1.12, past those pins; Mamba-3 SISO and the MIMO forward pass are not concerned",
    },
    symptoms=("Mamba-3 MIMO backward does not compile: ReduceOp cannot lower a layout",),
    concerns="mamba3",
    breaks="the first backward pass of Mamba-3 MIMO stops while it compiles: ReduceOp cannot lower a layout",
    retire_when="TileLang lowers that sum again, or mamba-ssm writes it in another way",
    threads=(
        Thread(
            repository="tile-ai/tilelang",
            number=2424,
            state="merged 2026-07-13, in 0.1.13, refuses sums that were wrong before",
        ),
    ),
    last_validated="2026-11-21, H200: all sums right with tilelang 0.1.8; x86-64 without GPU: kernels of mamba-ssm 2.3.2.post1 and main e9594ce lowered for sm_90a with tilelang 0.1.8 to 0.1.15",
)
