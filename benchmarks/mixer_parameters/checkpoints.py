"""A_log and D in checkpoints of a hybrid model, and the runs that can read them: through real files.

Each pair trains one model two steps, saves it with Megatron's dist_checkpointing, loads it into another that was
trained on other data, and compares. A pair that cannot be loaded is reported with the error.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from mixer_parameters.work import Model, Size, tokens

PAIRS = (("cast", "cast"), ("kept", "kept"), ("cast", "kept"), ("kept", "cast"))
OPTIMIZERS = {False: "Float16OptimizerWithFloat16Params", True: "DistributedOptimizer"}


def measure(folder: Path, size: Size, device: Any) -> list[dict[str, Any]]:
    """Return one row for each optimizer and pair."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    return [
        {"optimizer": name, "saved": saved, "loaded": loaded, **_pair(folder, size, device, saved, loaded, distributed)}
        for distributed, name in OPTIMIZERS.items()
        for saved, loaded in PAIRS
    ]


def _pair(folder: Path, size: Size, device: Any, saved: str, loaded: str, distributed: bool) -> dict[str, Any]:
    from torch.distributed.checkpoint.api import CheckpointException

    first = Model(saved, size, seed=1, distributed=distributed)
    other = Model(loaded, size, seed=2, distributed=distributed)
    for seed in (1, 2):
        first.step(tokens(size, seed=seed, device=device))
        other.step(tokens(size, seed=10 + seed, device=device))
    place = folder / f"{saved}-{loaded}-{distributed}"
    place.mkdir()
    _through_files(place / "whole", first, first, optimizer=True, load=False)
    before = _exempt(first)
    row: dict[str, Any] = {"in the files": _dtype_in(place / "whole")}
    for part, optimizer in (("model", False), ("model and optimizer", True)):
        try:
            _through_files(place / part.replace(" ", "-"), first, other, optimizer=optimizer, load=True)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - the failure is the measurement
            row[part] = f"fails: {str(error).strip().splitlines()[-1].partition(': [')[0][:160]}"
            continue
        after = _exempt(other)
        row[part] = (
            "same bits" if _same(before, after) else "rounded" if _same(_rounded(before), after) else "other values"
        )
        if optimizer:
            row["fp32 values that train on"] = "kept" if _same(first.masters(), other.masters()) else "rounded"
    return row


def _through_files(place: Path, first: Model, other: Model, *, optimizer: bool, load: bool) -> None:
    from megatron.core import dist_checkpointing

    place.mkdir()
    dist_checkpointing.save(first.sharded(is_loading=False, optimizer=optimizer), str(place))
    if load:
        other.load(dist_checkpointing.load(other.sharded(is_loading=True, optimizer=optimizer), str(place)))


def _exempt(model: Model) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in model.exempt()}


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {name: value.to(torch.bfloat16) for name, value in values.items()}


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(bool((value.double() == other[name].double()).all()) for name, value in one.items())


def _dtype_in(place: Path) -> str:
    """Return the dtypes of A_log and D as the files say."""
    from torch.distributed.checkpoint import FileSystemReader

    metadata = FileSystemReader(str(place)).read_metadata().state_dict_metadata
    found = {
        str(entry.properties.dtype)
        for key, entry in metadata.items()
        if key.rpartition(".")[2] in {"A_log", "D"} and not key.startswith("optimizer") and hasattr(entry, "properties")
    }
    return ", ".join(sorted(found))
