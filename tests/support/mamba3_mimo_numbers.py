"""Measure Mamba-3's MIMO backward on a GPU: accuracy, steps, throughput, a captured graph. As a script:

    mamba3_mimo_numbers.py --compile NUMBER    compile one of the kernels into TileLang's cache; NUMBER from 0 to 8
    mamba3_mimo_numbers.py --json FILE         measure everything; needs the overlay to be on

2.3.2.post1 traces its kernels anew with every call, which takes seconds; the reproducer makes it once in a process. The
rest of a call is still partly the host's; a captured graph replays the kernels alone.
"""

# ruff: noqa: T201 - prints the name of the compiled kernel

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

REPRODUCER = Path(__file__).resolve().parents[2] / "packs" / "05-mamba3-mimo-grouped-backward" / "reproduce.py"
LARGE = {"heads": 32, "batch": 2, "sequence": 2048, "dim": 128}
"""The sizes that upstream tuned the kernels for, by its own word, with rank 4, values of 64 and chunks of 16."""
LARGE_GROUPS = (1, 4, 8, 16, 32)


def reproducer(heads: int = 8, dim: int = 64) -> ModuleType:
    """Return the reproducer of pack 5 as a module of its own, for another number of heads or another dim."""
    spec = importlib.util.spec_from_file_location(f"reproduce_05_{heads}_{dim}", REPRODUCER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.HEADS, module.DIM = heads, dim
    return module


def layer(pack: ModuleType) -> ModuleType:
    entry: ModuleType = pack._import(f"{pack.PACKAGE}.mamba3_mimo")
    pack.take_one_configuration()
    return entry


def inputs(pack: ModuleType, groups: int, batch: int, sequence: int) -> tuple[Any, Any]:
    shape = {"batch": batch, "sequence": sequence, "rank": pack.RANK, "dim": pack.DIM, "value_dim": pack.VALUE_DIM}
    made = pack._inputs(groups, **shape, dtype=torch.bfloat16, device="cuda")
    return type(made)(*(each.requires_grad_() for each in made)), torch.ones_like(made.v).detach()


def compile_one(number: int) -> str:
    """Compile and run one kernel with all others left out; its results are not used."""
    which, variant = number % 3, number // 3
    pack = reproducer(dim=LARGE["dim"] if variant == 2 else 64)
    entry = layer(pack)
    ending = "_varlen" if variant == 1 else ""
    names = [("fwd", "mamba_mimo_fwd"), ("bwd", "mamba_mimo_bwd_fwd"), ("bwd", "mamba_mimo_bwd_bwd")]
    for place, (part, name) in enumerate(names):
        if place != which:
            setattr(sys.modules[f"{pack.PACKAGE}.mamba3_mimo_{part}{ending}"], name, lambda *_, **__: lambda *_: None)
    bounds = torch.tensor(pack.LENGTHS, dtype=torch.int32, device="cuda") if variant == 1 else None
    made, dout = inputs(pack, 1, 1 if variant == 1 else 2, pack.LENGTHS[-1])
    pack.layer_gradients(entry, made, dout, bounds)
    torch.cuda.synchronize()
    return f"{names[which][1]}{ending}, dim {pack.DIM}"


def step(pack: ModuleType, entry: ModuleType, made: Any, dout: Any) -> Callable[[], dict[str, Any]]:
    return lambda: pack.layer_gradients(entry, made, dout, None)


def captured(run: Callable[[], dict[str, Any]]) -> tuple[Callable[[], None], dict[str, Any]]:
    """Return the replay of a captured forward and backward pass, and its gradients; errors of capturing are raised."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = run()
    return graph.replay, gradients


def milliseconds(runs: dict[int, Callable[[], object]], rounds: int) -> dict[int, float]:
    """Return medians; all are timed in turn, so that changes on the device affect all alike."""
    times: dict[int, list[float]] = {groups: [] for groups in runs}
    for number in range(rounds + 2):
        for groups, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            if number >= 2:
                times[groups].append(start.elapsed_time(end))
    return {groups: statistics.median(each) for groups, each in times.items()}


def throughput() -> dict[str, Any]:
    """Return times of a forward and backward pass for each number of groups, called and, where that works, captured."""
    pack = reproducer(LARGE["heads"], LARGE["dim"])
    entry = layer(pack)
    runs = {}
    for groups in LARGE_GROUPS:
        made, dout = inputs(pack, groups, LARGE["batch"], LARGE["sequence"])
        runs[groups] = step(pack, entry, made, dout)
    shape = {**LARGE, "rank": pack.RANK, "value_dim": pack.VALUE_DIM, "chunk": pack.CHUNK, "dtype": "bfloat16"}
    found: dict[str, Any] = {"shape": shape, "call": beside_all(milliseconds(runs, 10))}
    try:
        replays = {groups: captured(run)[0] for groups, run in runs.items()}
    except Exception as error:  # noqa: BLE001 - the result is whether upstream's kernels can be captured
        return {**found, "not_captured": f"{type(error).__name__}: {str(error)[:200]}"}
    return {**found, "graph": beside_all(milliseconds(replays, 30))}


def beside_all(times: dict[int, float]) -> dict[str, dict[int, float]]:
    """Return times, and the throughput of each number of groups relative to that of a group for each head."""
    alone = times[LARGE["heads"]]
    return {"ms": times, "throughput_ratio": {groups: round(alone / time, 4) for groups, time in times.items()}}


def graphs() -> dict[int, str]:
    """Return for each number of groups whether a captured pass replays to the same bits, or why it is not captured."""
    pack = reproducer()
    entry = layer(pack)
    said = {}
    for groups in pack.GROUPS:
        made, dout = inputs(pack, groups, 2, 128)
        run = step(pack, entry, made, dout)
        try:
            replay, gradients = captured(run)
        except Exception as error:  # noqa: BLE001 - as above
            said[groups] = f"{type(error).__name__}: {str(error)[:200]}"
            torch.cuda.synchronize()
            continue
        for each in gradients.values():
            each.zero_()
        replay()
        torch.cuda.synchronize()
        eager = run()
        other = [name for name, value in eager.items() if not value.equal(gradients[name])]
        said[groups] = f"other bits: {', '.join(other)}" if other else "same bits"
    return said


def everything() -> dict[str, Any]:
    pack = reproducer()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "triton", "tilelang", "mamba-ssm")},
        "accuracy": {"plain": pack.accuracy(None), "packed": pack.accuracy(pack.LENGTHS)},
        "losses": {groups: pack.train(groups) for groups in pack.GROUPS},
    }
    found["problems"] = {
        kind: {groups: pack.problems_of(seen, numbers) for groups, seen in numbers.items()}
        for kind, numbers in found["accuracy"].items()
    }
    found["graphs"] = graphs()
    found["throughput"] = throughput()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", type=int)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    import megacpp_overlays  # noqa: F401 - arms the overlay

    if chosen.compile is not None:
        print(compile_one(chosen.compile))
    else:
        chosen.json.write_text(json.dumps(everything(), indent=1) + "\n")


if __name__ == "__main__":
    main()
