"""Launches of `reshardable_runs.py`: a plan for some ranks, the results of each of them, and state that was dumped or saved."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import warm_python
from places import HANG_S, SUPPORT, measuring
from warm_python import UNCOMPILED

ID = "fully-reshardable-padding"
SCRIPT = SUPPORT / "reshardable_runs.py"
KEYS = ("param", "exp_avg", "exp_avg_sq")


def launch(
    folder: Path,
    size: int,
    *steps: dict[str, Any],
    path: Path | None = None,
    device: str = "cpu",
    measured: bool = False,
    tensor_parallel: int = 1,
) -> list[list[Any]]:
    """Run a plan on some ranks; return for each rank the results of its steps.

    Args:
        folder: for the plan and the results.
        size: how many ranks.
        steps: see `reshardable_runs.Ranks`.
        path: a folder that is put first on the path, such as another release.
        device: cpu or cuda.
        measured: whether coverage is measured in the ranks.
        tensor_parallel: how many ranks hold one copy of the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / "plan.json"
    said = {"device": device, "size": size, "tensor_parallel": tensor_parallel, "steps": steps}
    plan.write_text(json.dumps(said))
    paths = [*([str(path)] if path else []), str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, **(measuring() if measured else {}), "PYTHONPATH": os.pathsep.join(paths)}
    env |= {"OMP_NUM_THREADS": "1", "MEGACPP_OVERLAYS_LOG": "logging"}
    # 0.15 builds a library when it is imported, and there is no GPU to ask for which kind.
    env.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    started = [
        warm_python.start(["-W", "ignore", SCRIPT, plan, str(rank)], env, after=UNCOMPILED) for rank in range(size)
    ]
    ended = [(each.communicate(HANG_S), each.wait()) for each in started]
    assert not any(code for _, code in ended), "\n".join(error[-3000:] for (_, error), _ in ended)
    return [json.loads(Path(f"{plan}.{rank}").read_text()) for rank in range(size)]


def step(do: str, **given: Any) -> dict[str, Any]:
    return {"do": do, **{name: str(value) if isinstance(value, Path) else value for name, value in given.items()}}


def dumped(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return the state of every parameter, flat, put together from the pieces of all ranks."""
    found: dict[str, list[Any]] = {}
    for piece in sorted(path.parent.glob(f"{path.name}.*")):
        for name, (start, _, kept) in torch.load(piece, weights_only=True).items():
            found.setdefault(name, []).append((start, kept))
    state: dict[str, dict[str, torch.Tensor]] = {}
    for name, pieces in found.items():
        pieces.sort(key=lambda each: each[0])
        state[name] = {key: torch.cat([kept[key] for _, kept in pieces]) for key in pieces[0][1]}
    return state


def saved(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return the state of every parameter that a checkpoint has, flat, as torch's own reader reads it."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # metadata of older releases name classes of Megatron, which torch imports
        return _saved(folder, dcp)


def _saved(folder: Path, dcp: Any) -> dict[str, dict[str, torch.Tensor]]:
    kept = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    prefixes = {**{key: f"optimizer.state.{key}." for key in KEYS}, "weight": ""}
    names = [name.removeprefix(prefixes["param"]) for name in kept if name.startswith(prefixes["param"])]
    whole: dict[str, Any] = {}
    for name in names:
        for prefix in prefixes.values():
            about = kept[f"{prefix}{name}"]
            whole[f"{prefix}{name}"] = torch.empty(about.size, dtype=about.properties.dtype)
    dcp.load(whole, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return {name: {key: whole[f"{prefix}{name}"].flatten() for key, prefix in prefixes.items()} for name in names}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the parameters any of whose state is not the same, bit for bit."""
    assert one.keys() == other.keys()
    return [name for name in one if any(not torch.equal(one[name][key], other[name][key]) for key in one[name])]
