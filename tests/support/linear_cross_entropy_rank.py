"""Run in a fresh interpreter: one rank of a tensor-parallel group on the CPU; errors against one process as JSON.

LINEAR_CROSS_ENTROPY has the rank, the number of ranks and a file to meet at.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from linear_cross_entropy_cases import Inputs, call, draw, error, found, leaves_of, truth
from linear_cross_entropy_rank_cases import CASES, Case
from torch import distributed

from megacpp_overlays.kernels.linear_cross_entropy import linear_cross_entropy
from megacpp_overlays.kernels.linear_cross_entropy.memory import Memory

TOKENS, HIDDEN, CLASSES = 12, 5, 24


def inputs_of(case: Case) -> Inputs:
    """Return the call that all ranks make together."""
    inputs = draw(TOKENS, HIDDEN, CLASSES, dtype=getattr(torch, case.dtype), **case.options)
    if case.batch:
        shape = (TOKENS // case.batch, case.batch)
        inputs.hidden, inputs.target = inputs.hidden.reshape(*shape, HIDDEN), inputs.target.view(shape)
        if inputs.reduction == "none":
            inputs.arriving = inputs.arriving.reshape(shape)
    if case.labelled is not None:
        ignored = case.options["ignore_index"]
        inputs.target[inputs.target == ignored] = 0
        inputs.target[torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))[case.labelled :]] = ignored
    if case.skip and inputs.reduction == "none":
        inputs.arriving = inputs.arriving.clone()
        inputs.arriving[::3] = 0.0
    if case.first_shard_only:
        inputs.target = torch.where(inputs.alive, inputs.target % 8, inputs.target)
        assert inputs.bias is not None
        inputs.bias = inputs.bias.clone()
        inputs.bias[-8:] = float("-inf")
    return inputs


def run(case: Case, rank: int, ranks: int, group: Any) -> dict[str, Any]:
    """Return the errors of this rank's results, the bits of its losses, and the problems."""
    inputs = inputs_of(case)
    true = truth(inputs)
    classes, tokens = CLASSES // ranks, inputs.hidden.shape[0] // ranks
    mine = slice(rank * classes, (rank + 1) * classes)
    part = slice(rank * tokens, (rank + 1) * tokens) if case.sequence_parallel else slice(None)
    inputs.hidden, inputs.weight = inputs.hidden[part], inputs.weight[mine]
    inputs.bias = None if inputs.bias is None else inputs.bias[mine]
    leaves = leaves_of(inputs)
    for name in case.frozen:
        leaves[name].requires_grad_(False)
    main_grad = torch.ones(classes, HIDDEN) if case.main_grad else None
    masked = "skip" if case.skip else "compute"
    memory = Memory(logits="keep", masked=masked) if case.keep else Memory(block_classes=3, masked=masked)

    loss = call(inputs, group=group, sequence_parallel=case.sequence_parallel, main_grad=main_grad, memory=memory)
    loss.backward(inputs.arriving)

    problems = [f"{name} has a gradient" for name in case.frozen if leaves[name].grad is not None]
    errors = {"loss": error(loss.detach(), true["loss"])}
    for name, expected in {"hidden": true["hidden"][part], "weight": true["weight"][mine]}.items():
        slope = leaves[name].grad
        if name == "weight" and main_grad is not None:
            problems += [] if slope is None else ["the weight has a gradient beside main_grad"]
            slope = main_grad - 1
        elif slope is not None and slope.dtype != leaves[name].dtype:
            problems.append(f"the gradient of {name} is {slope.dtype}")
        if name not in case.frozen:
            errors[name] = error(slope, expected)
    if inputs.bias is not None:
        errors["bias"] = error(leaves["bias"].grad, true["bias"][mine])
    bits = loss.detach().view(torch.int64 if loss.dtype == torch.float64 else torch.int32).flatten().tolist()
    return {"errors": errors, "problems": problems, "bits": bits}


def subgroup(rank: int) -> dict[str, float] | None:
    """Return the errors in a group of the first and the last of three ranks."""
    group = distributed.new_group([0, 2])
    if rank == 1:
        return None
    inputs = draw(TOKENS, HIDDEN, CLASSES, label_smoothing=0.1)
    true = truth(inputs)
    half = slice(0, CLASSES // 2) if rank == 0 else slice(CLASSES // 2, CLASSES)
    inputs.weight = inputs.weight[half]
    true["weight"] = true["weight"][half]
    seen = found(inputs, group=group, memory=Memory(block_classes=5))
    return {name: error(seen[name], true[name]) for name in true}


def refusal(group: Any, **more: Any) -> str:
    """Return the error for shapes that would fit one rank alone. No rank waits for another."""
    given = {"hidden": torch.zeros(4, 3), "weight": torch.zeros(5, 3), "target": torch.zeros(4, dtype=torch.int64)}
    try:
        linear_cross_entropy(**given, **more, group=group)
    except ValueError as error:
        return str(error)
    return "nothing"


def main() -> None:
    """Meet the other ranks, go through all cases and answer."""
    request = json.loads(os.environ["LINEAR_CROSS_ENTROPY"])
    rank, ranks = request["rank"], request["ranks"]
    distributed.init_process_group("gloo", init_method=f"file://{request['meet']}", rank=rank, world_size=ranks)
    world = distributed.group.WORLD
    report = {
        "cases": {name: run(case, rank, ranks, world) for name, case in CASES.items()},
        "subgroup": subgroup(rank) if ranks == 3 else None,
        "refusals": [refusal(world, sequence_parallel=True), refusal(world, class_weight=torch.ones(5))],
    }
    distributed.destroy_process_group()
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
