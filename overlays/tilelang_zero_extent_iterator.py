"""Gate for a TileLang that stops with a division by zero in kernels that spread a fragment over an odd number of columns."""

from __future__ import annotations

from megacpp_overlays.feature_probes import tilelang_zero_extent_iterator as feature
from megacpp_overlays.model import Gate, Thread

OVERLAY = Gate(
    id="tilelang-zero-extent-iterator",
    pack=13,
    title="a TileLang whose layout inference divides by zero is installed",
    target=feature.TARGET,
    beside=(),
    probe=feature.probe,
    unsupported={
        feature.EQUALITY_ONLY: "Mamba-3 as published compiles; for kernels that stop like this, install tilelang 0.1.12, "
        "the one release with the repair that still compiles the Mamba-3 MIMO backward, past mamba-ssm's pins of tilelang "
        "and apache-tvm-ffi, and mind that it gets some grouped sums wrong (tilelang-grouped-reduce); without MIMO, 0.1.13 or "
        "newer",
    },
    symptoms=(
        "Divide by zero in layout inference of TileLang",
        "TileLang kernel of an odd width does not compile",
    ),
    concerns="every model",
    breaks="kernels that spread a fragment over a number of columns that is no power of two do not compile: Divide by "
    "zero in layout inference",
    retire_when="every supported TileLang is 0.1.12 or newer",
    threads=(
        Thread(repository="tile-ai/tilelang", number=2394, state="closed when last seen, reported 2026-06-14"),
        Thread(repository="tile-ai/tilelang", number=2469, state="merged 2026-07-03, in 0.1.12, the repair"),
    ),
    last_validated="2026-11-21, x86-64 without GPU: C++ of 0.1.6.post2 to 0.1.15 read, kernels lowered with 0.1.8, 0.1.11, 0.1.12, 0.1.13 and 0.1.15",
)
