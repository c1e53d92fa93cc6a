"""Gate for a TileLang whose sums over groups may be wrong without an error."""

from __future__ import annotations

from megacpp_overlays.feature_probes import tilelang_grouped_reduce as feature
from megacpp_overlays.model import Gate, Thread

OVERLAY = Gate(
    id="tilelang-grouped-reduce",
    pack=18,
    title="a TileLang that adds values of some grouped sums more than once is installed",
    target=feature.TARGET,
    beside=(),
    probe=feature.probe,
    unsupported={
        feature.ADDED_TOO_OFTEN: "Mamba-3's kernels are not concerned; for kernels of your own that sum a fragment in groups "
        "whose number is no power of two, use tilelang 0.1.13 or newer, or 0.1.8, which refuses them",
    },
    symptoms=(
        "a TileLang sum is a multiple of the right value",
        "T.reduce_sum is wrong for groups that are no power of two",
    ),
    concerns="every model",
    breaks="T.reduce_sum over groups whose number is no power of two gives a multiple of the sum, without an error",
    retire_when="every supported TileLang is 0.1.13 or newer, or 0.1.8",
    threads=(Thread(repository="tile-ai/tilelang", number=2424, state="merged 2026-07-13, in 0.1.13, the repair"),),
    last_validated="2026-11-21, x86-64 without GPU: generated source of 0.1.8 to 0.1.15, 170 shapes with four of them",
)
