"""The names that a pack's `reproduce.py` and `neighbours.py` are written with; `megacpp-overlays repro` runs them."""

from megacpp_overlays.repro.case import Behaviour, Blocked, Case, TargetAbsent
from megacpp_overlays.repro.cpu_for_gpu import cpu_for_gpu, fsdp_on_cpu
from megacpp_overlays.repro.neighbour import Neighbour, beside
from megacpp_overlays.repro.worlds import on_ranks

__all__ = [
    "Behaviour",
    "Blocked",
    "Case",
    "Neighbour",
    "TargetAbsent",
    "beside",
    "cpu_for_gpu",
    "fsdp_on_cpu",
    "on_ranks",
]
