"""Public names for a pack's `reproduce.py` and `neighbours.py`, which `megacpp-overlays repro` runs."""

from megacpp_overlays.repro.case import Behaviour, Blocked, Case, TargetAbsent
from megacpp_overlays.repro.cpu_for_gpu import cpu_for_gpu
from megacpp_overlays.repro.fsdp import (
    compared,
    fsdp_on_cpu,
    fully_shard_module,
    meshes_on_cpu,
    step_beside,
    weights_of_all_ranks,
)
from megacpp_overlays.repro.interpreter import triton_interpreter
from megacpp_overlays.repro.neighbour import Neighbour, beside
from megacpp_overlays.repro.worlds import on_ranks

__all__ = [
    "Behaviour",
    "Blocked",
    "Case",
    "Neighbour",
    "TargetAbsent",
    "beside",
    "compared",
    "cpu_for_gpu",
    "fsdp_on_cpu",
    "fully_shard_module",
    "meshes_on_cpu",
    "on_ranks",
    "step_beside",
    "triton_interpreter",
    "weights_of_all_ranks",
]
