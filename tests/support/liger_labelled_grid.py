"""Run in a fresh interpreter: one liger-kernel release, every reduction, with the overlay and with upstream's own code; JSON.

    LIGER_GRID='{"device": "cpu", "scale": 1, "cases": ["plain"], "memory": {}}' python tests/support/liger_labelled_grid.py

The rest is as in `liger_grid.py`. In the Triton interpreter upstream's kernels lack `tanh`, and methods of numbers that class weights need:
errors are reported.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import replace
from typing import Any

import liger_grid
import torch
from liger_cases import CASES, Case
from torch.utils.flop_counter import FlopCounterMode

import megacpp_overlays
from megacpp_overlays.kernels.linear_cross_entropy import memory as linear_cross_entropy_memory
from megacpp_overlays.kernels.linear_cross_entropy import reference

ID = "liger-flce-labelled"
REDUCTIONS = ("mean", "sum", "none")
ARRIVES = 0.7
"""At a mean or a sum."""


def arriving(case: Case, reduction: str, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient that arrives at the outcome, and its value for each token."""
    target = given["target"]
    if reduction == "none":
        arrived = liger_grid.arriving(case, target, 1)
        return arrived, arrived.double().cpu()
    labelled = target != case.options.get("ignore_index", -100)
    each = torch.full((target.numel(),), ARRIVES, dtype=torch.float64)
    if reduction == "mean":
        count = labelled.sum() if given["ce_weight"] is None else given["ce_weight"][target[labelled]].double().sum()
        each /= float(count) or 1.0
    return torch.tensor(ARRIVES, device=target.device), each


def run(case: Case, reduction: str, device: str, scale: int) -> dict[str, Any]:
    """Return outputs, and the relative errors of loss and gradients against float64."""
    asked = replace(case, options={**case.options, "reduction": reduction})
    given = liger_grid.tensors(case, device, scale)
    # It knows no addmm with a dtype of its own, which CUDA devices take.
    with FlopCounterMode(display=False) if device == "cpu" else contextlib.nullcontext() as counter:
        loss, *others = liger_grid.outputs(asked, given)
        arrived, each = arriving(case, reduction, given)
        loss.backward(arrived)
    x, weight, target, named = liger_grid.truth(case, given)
    losses, _ = reference.token_losses(x, weight, target, **named)
    gradients = reference.gradients(x, weight, target, each, **named)
    if case.strided_input:
        gradients = (gradients[0].t(), *gradients[1:])
    true = losses if reduction == "none" else (losses * each).sum() / ARRIVES
    errors = {"loss": liger_grid.error(loss.detach(), true)}
    leaves = {"input": given["leaf"], "weight": given["weight"], "bias": given["bias"]}
    for name, gradient in zip(leaves, gradients, strict=True):
        if leaves[name] is not None and name not in case.frozen:
            found = leaves[name].grad
            errors[name] = 1.0 if found is None else liger_grid.error(found, gradient)
    kinds = [
        (str(value.dtype), tuple(value.shape), value.requires_grad) for value in (loss, *others) if value is not None
    ]
    values = [None if value is None else value.detach().double().cpu().flatten().tolist() for value in others]
    return {"errors": errors, "kinds": kinds, "others": values, "flops": counter.get_total_flops() if counter else None}


def tried(case: Case, reduction: str, device: str, scale: int) -> dict[str, Any]:
    """Return the result of a call, or its error."""
    try:
        return run(case, reduction, device, scale)
    except Exception as error:  # noqa: BLE001 - upstream's kernels pass on the errors of Triton
        return {"raised": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Run the cases with the overlay, then without it."""
    request = json.loads(os.environ["LIGER_GRID"])
    device, scale = request["device"], request["scale"]
    linear_cross_entropy_memory._chosen = linear_cross_entropy_memory.Memory(**request["memory"])
    record = next(each for each in megacpp_overlays.audit().records if each.overlay.id == ID)
    report: dict[str, Any] = {"decision": record.decision.value, "shape": record.shape, "reason": record.reason}
    for state in ("on", "off"):
        report[state] = {
            name: {reduction: tried(CASES[name], reduction, device, scale) for reduction in REDUCTIONS}
            for name in request["cases"]
        }
        megacpp_overlays.undo()
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
