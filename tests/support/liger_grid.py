"""Run in a fresh interpreter: one liger-kernel release, many per-token losses, errors against float64 as JSON.

    LIGER_GRID='{"device": "cpu", "scale": 1, "cases": ["plain"], "memory": {}}' python tests/support/liger_grid.py

The release is the one that is first on the path, which holds this folder too. TRITON_INTERPRET must be set outside,
where there is no GPU. `memory` has the settings for this process, by the fields of `Memory`.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
from typing import Any

import torch
from liger_cases import CASES, Case
from liger_kernel.ops import fused_linear_cross_entropy as upstream

import megacpp_overlays
from megacpp_overlays.kernels.linear_cross_entropy import memory as linear_cross_entropy_memory
from megacpp_overlays.kernels.linear_cross_entropy import reference

FUNCTION = upstream.LigerFusedLinearCrossEntropyFunction
NAMES = tuple(inspect.signature(FUNCTION.forward).parameters)[1:]
EXTRA_OUTPUTS = tuple(name for name in NAMES if name.startswith("return_"))


def tensors(case: Case, device: str, scale: int) -> dict[str, Any]:
    """Return the inputs of a case: the same on every run."""
    generator = torch.Generator().manual_seed(9)
    factor = scale if case.tokens > 1 else 1
    tokens, hidden, vocabulary = case.tokens * factor, case.hidden * scale, case.vocabulary * scale
    dtype = getattr(torch, case.dtype)

    def leaf(name: str, *shape: int, spread: float = 1.0) -> Any:
        values = (spread * torch.randn(*shape, generator=generator)).to(device, dtype)
        return values.requires_grad_(name not in case.frozen)

    x = leaf("input", hidden if case.strided_input else tokens, tokens if case.strided_input else hidden)
    target = torch.randint(0, vocabulary, (tokens,), generator=generator)
    ignore_index = case.options.get("ignore_index", -100)
    for place in range(tokens) if case.ignored == (-1,) else case.ignored:
        target[place::7] = ignore_index
    ce_weight = None
    if case.ce_weight:
        ce_weight = (torch.rand(2 * vocabulary, generator=generator) + 0.5).to(device)
        ce_weight = ce_weight[::2] if case.ce_weight == "strided" else ce_weight[:vocabulary]
    return {
        "_input": x.t() if case.strided_input else x,
        "leaf": x,
        "weight": leaf("weight", vocabulary, hidden, spread=1.5 / scale**0.5),
        "target": target.to(device),
        "bias": leaf("bias", vocabulary) if case.bias else None,
        "ce_weight": ce_weight,
    }


def arriving(case: Case, target: Any, seed: int) -> Any:
    """Return the gradient that arrives at the losses."""
    tokens = target.numel()
    values = torch.randn(2 * tokens, generator=torch.Generator().manual_seed(seed)).to(target.device)
    match case.arrives:
        case "strided":
            return values[::2]
        case "expanded":
            return values[:1].expand(tokens)
        case "masked":
            return torch.where(target == case.options.get("ignore_index", -100), 0.0, values[:tokens])
        case "zero first":
            values[0] = 0.0
    return values[:tokens]


def outputs(case: Case, given: dict[str, Any]) -> Any:
    """Call the function as its users do: by position, and no further than needed."""
    call = {**given, "reduction": "none", **case.options}
    if "accum_dtype" in case.options:
        call["accum_dtype"] = getattr(torch, case.options["accum_dtype"])
    last = max(NAMES.index(name) for name, value in call.items() if name in NAMES and value is not None)
    defaults = inspect.signature(FUNCTION.forward).parameters
    context: Any = contextlib.nullcontext()
    if case.autocast:
        context = torch.autocast(given["target"].device.type, dtype=getattr(torch, case.autocast))
    with context:
        return FUNCTION.apply(*(call.get(name, defaults[name].default) for name in NAMES[: last + 1]))


def run(case: Case, device: str, scale: int) -> dict[str, Any]:
    """Return the relative errors of the loss and of each gradient, and the problems."""
    given = tensors(case, device, scale)
    leaves = {"input": given["leaf"], "weight": given["weight"], "bias": given["bias"]}
    leaves = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    before = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    found = outputs(case, given)
    loss = found[0]
    first, second = arriving(case, given["target"], 1), arriving(case, given["target"], 2)
    match case.use:
        case "once":
            arrived = first
            loss.backward(first)
        case "twice":
            arrived = first + second
            loss.backward(first, retain_graph=True)
            loss.backward(second)
        case "two terms":
            arrived = first + 2 * loss.detach() * second
            ((loss * first).sum() + (loss.square() * second).sum()).backward()

    problems = [f"{name} was changed" for name, leaf in leaves.items() if not torch.equal(leaf, before[name])]
    for name, leaf in leaves.items():
        if name in case.frozen and leaf.grad is not None:
            problems.append(f"{name} is frozen and has a gradient")
        elif name not in case.frozen and (leaf.grad is None or leaf.grad.dtype != leaf.dtype):
            problems.append(f"{name} has no gradient of its own dtype")
    if problems:
        return {"problems": problems}

    x, weight, target, named = truth(case, given)
    true_loss, _ = reference.token_losses(x, weight, target, **named)
    gradients = reference.gradients(x, weight, target, arrived.double().cpu(), **named)
    if case.strided_input:
        gradients = (gradients[0].t(), *gradients[1:])
    errors = {"loss": error(loss.detach(), true_loss)}
    for name, gradient in zip(("input", "weight", "bias"), gradients, strict=True):
        if name in leaves and name not in case.frozen:
            errors[name] = error(leaves[name].grad, gradient)
    return {"problems": [], "errors": errors}


def truth(case: Case, given: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return the inputs of the reference: rounded as the products of the case round, and in float64 from there on."""

    def true(value: Any) -> Any:
        rounded = value.detach()
        if case.autocast and value is not given["bias"] and value is not given["ce_weight"]:
            rounded = rounded.to(getattr(torch, case.autocast))
        return rounded.double().cpu()  # float64 is cheap there, and every operation is deterministic

    terms = {
        "ignore_index": "ignore_index",
        "lse_square_scale": "lse_square_scale",
        "label_smoothing": "label_smoothing",
        "softcap": "softcap",
        "use_token_scaling": "token_scaling",
    }
    named = {
        **{name: None if given[name] is None else true(given[name]) for name in ("bias", "ce_weight")},
        **{ours: case.options[theirs] for theirs, ours in terms.items() if theirs in case.options},
    }
    return true(given["_input"]), true(given["weight"]), given["target"].cpu(), named


def error(seen: Any, true: Any) -> float:
    """Return the relative error in the Euclidean norm; the absolute one where the truth is zero."""
    size = float(true.norm())
    return float((seen.double().cpu() - true).norm()) / (size or 1.0)


def everything(reduction: str, device: str, scale: int) -> list[Any]:
    """Return all outputs and gradients of one call with every output asked for."""
    flags = dict.fromkeys(EXTRA_OUTPUTS, True)
    case = Case(options={"reduction": reduction, "lse_square_scale": 0.05, **flags}, bias=True, ignored=(1,))
    given = tensors(case, device, scale)
    found = outputs(case, given)
    loss = found[0]
    loss.backward(torch.full_like(loss, 0.5))
    bare = outputs(Case(options={"reduction": reduction}), {**given, "bias": None})
    return [*found, *bare[1:], given["leaf"].grad, given["weight"].grad, given["bias"].grad]


def losses(dtype: str, device: str, scale: int) -> dict[str, Any]:
    """Return all outputs of one call that asks for losses and z-losses, and how far both are from float64."""
    options: dict[str, Any] = {"lse_square_scale": 0.05, "label_smoothing": 0.1, "return_z_loss": True}
    if "use_token_scaling" in NAMES:
        options["use_token_scaling"] = True
    case = Case(options=options, bias=True, ce_weight="contiguous", ignored=(1,), dtype=dtype)
    given = tensors(case, device, scale)
    found = [each if each is None else each.detach() for each in outputs(case, given)]
    x, weight, target, named = truth(case, given)
    true = reference.token_losses(x, weight, target, **named)
    return {"outputs": found, "errors": [error(*pair) for pair in zip(found, true, strict=False)]}


def compared(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Return how the outputs of two calls differ."""
    pairs = list(zip(ours["outputs"], theirs["outputs"], strict=True))
    kinds = [each is None or (each.dtype, each.shape, each.requires_grad) for pair in pairs for each in pair]
    return {
        "same kinds": kinds[::2] == kinds[1::2],
        "apart": [error(mine, upstream_s.double().cpu()) for mine, upstream_s in pairs if mine is not None],
        "ours": ours["errors"],
        "theirs": theirs["errors"],
    }


def same(one: list[Any], other: list[Any]) -> bool:
    """Return whether two lists hold the same bits, and None in the same places."""
    return len(one) == len(other) and all(
        a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


def second_derivative(device: str) -> str:
    """Return the outcome of a request for a second derivative."""
    given = tensors(Case(), device, 1)
    (gradient,) = torch.autograd.grad(outputs(Case(), given)[0].square().sum(), given["leaf"], create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as refused:
        return str(refused)
    return "accepted"


def main() -> None:
    """Run the cases, then undo the overlay and compare with upstream."""
    request = json.loads(os.environ["LIGER_GRID"])
    device, scale = request["device"], request["scale"]
    linear_cross_entropy_memory._chosen = linear_cross_entropy_memory.Memory(**request["memory"])
    torch.use_deterministic_algorithms(True, warn_only=False)
    record = next(r for r in megacpp_overlays.audit().records if r.overlay.pack == 9)
    report: dict[str, Any] = {
        "decision": record.decision.value,
        "shape": record.shape,
        "reason": record.reason,
        "cases": {name: run(CASES[name], device, scale) for name in request["cases"]},
    }
    if record.decision.value == "active":
        ours = {reduction: everything(reduction, device, scale) for reduction in ("mean", "sum", "none")}
        ours_per_token = {dtype: losses(dtype, device, scale) for dtype in ("float32", "bfloat16")}
        report["second derivative"] = second_derivative(device)
        megacpp_overlays.undo("liger-flce-none-backward")
        theirs = {reduction: everything(reduction, device, scale) for reduction in ("mean", "sum", "none")}
        report["same"] = {name: same(ours[name], theirs[name]) for name in ("mean", "sum")}
        report["same with metrics"] = same(ours["none"][:-3], theirs["none"][:-3])
        report["losses"] = {
            dtype: compared(each, losses(dtype, device, scale)) for dtype, each in ours_per_token.items()
        }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
