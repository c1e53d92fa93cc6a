"""Weights loaded into models with offloaded optimizers that are right without the overlay: of precision-aware optimizers, of none that is offloaded, and
where a framework refreshes the copies itself, before Megatron, after it, or alone."""

from __future__ import annotations

import functools
from typing import Any

from megacpp_overlays.repro import Neighbour, TargetAbsent, beside

PACK = beside(__file__)


def _refreshed(optimizer: Any) -> None:
    """Refresh main weights, copies on the host, and fp32 copies one after the other, as frameworks do."""
    pairs = zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True)
    for model, main in ((one, own) for models, mains in pairs for one, own in zip(models, mains, strict=True)):
        held = optimizer._get_model_param_range_map(model)["param"]
        main.data.copy_(model.view(-1)[held.start : held.end])
    for main, copy in optimizer.optimizer.gpu_params_map_cpu_copy.items():
        copy.data.copy_(main.data)
    if update := getattr(optimizer.optimizer, "update_fp32_param_by_new_param", None):
        update()


def _before(optimizer: Any) -> None:
    _refreshed(optimizer)
    PACK.reload(optimizer)


def _after(optimizer: Any) -> None:
    PACK.reload(optimizer)
    _refreshed(optimizer)


def _state_too(optimizer: Any) -> None:
    """Load the state of the optimizer, which has its own main weights."""
    optimizer.optimizer.load_state_dict(optimizer.optimizer.state_dict())


def _trained(**asked: Any) -> dict[str, Any]:
    if not PACK.refreshes():
        raise TargetAbsent("no copy is refreshed")
    found: dict[str, Any] = PACK.trained(**asked)
    return found


ASKED: dict[str, dict[str, Any]] = {
    "precision-aware": PACK.AWARE,
    "precision-aware-half": {**PACK.AWARE, "optimizer_offload_fraction": 0.5, "before": 2},
    "not-offloaded": {"optimizer_cpu_offload": False, "before": 2},
    "refreshed-alone": {"load": _refreshed},
    "refreshed-before": {"load": _before, "before": 2},
    "refreshed-after": {"load": _after, "optimizer_offload_fraction": 0.5},
    "with-its-state": {**PACK.AWARE, "load": _state_too, "before": 2},
    "with-its-state-half": {**PACK.AWARE, "load": _state_too, "before": 2, "optimizer_offload_fraction": 0.5},
}
NEIGHBOURS = tuple(
    Neighbour(name=name, overlay="cpu-offload-reload", run=functools.partial(_trained, **asked))
    for name, asked in ASKED.items()
)
