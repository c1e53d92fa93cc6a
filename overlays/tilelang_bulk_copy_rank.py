"""Gate for TMA lowering of Mamba-3 MIMO, switched on with a TileLang that cannot copy its three axes."""

from __future__ import annotations

from megacpp_overlays.feature_probes import tilelang_bulk_copy_rank as feature
from megacpp_overlays.model import Gate, Thread

OVERLAY = Gate(
    id="tilelang-bulk-copy-rank",
    pack=8,
    title="TMA lowering is on for Mamba-3 MIMO, with a TileLang whose bulk copy takes two axes",
    target=feature.TARGET,
    beside=("tilelang",),
    decided_by="tilelang",
    probe=feature.probe,
    unsupported={
        feature.TWO_AXES_ONLY: "switch TMA lowering off again, as mamba-ssm publishes its kernels, or use tilelang 0.1.9 to 0.1.12, where it is harmless and gains nothing",
    },
    symptoms=(
        "Mamba-3 MIMO does not compile: Check failed: InputDim() == 2",
        "TileLang compile error with TMA lowering",
    ),
    concerns="mamba3",
    breaks="the Mamba-3 MIMO backward does not compile: Check failed: InputDim() == 2",
    retire_when="every supported TileLang is 0.1.9 or newer",
    threads=(Thread(repository="tile-ai/tilelang", number=2023, state="merged 2026-04-11, in 0.1.9, the repair"),),
    last_validated="2026-11-21, x86-64 without GPU: kernels of mamba-ssm 2.3.2.post1 lowered for sm_90a with tilelang 0.1.8 to 0.1.15",
)
