"""Run in a fresh interpreter: measurements of the hybrid models of the tree that is first on the path, on the CPU, as JSON.

MEGACPP_OVERLAYS and its like decide which overlays are on. HYBRID has, for one rank of a tensor-parallel group, its number, how many
there are, and a file to meet at. With HYBRID_ONLY set, only one step runs.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import sys
from typing import Any
from unittest import mock

import torch

import megacpp_overlays

# isort: split
import hybrid_model
from hybrid_linear_ce_cases import CASES, RANKED
from hybrid_model import inputs, make, upstream

MAMBA = "mamba model"


def step(model: Any, given: dict[str, Any], **more: Any) -> tuple[Any, dict[str, Any]]:
    """Return the loss of one step and every gradient."""
    model.zero_grad()
    seen = model(**given, **more)
    seen.float().pow(2).mean().backward()
    return seen.detach(), {name: each.grad for name, each in model.named_parameters()}


def model_class(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the class that they name."""
    from megatron.core.models.mamba.mamba_model import MambaModel

    return options | ({"model_class": MambaModel} if options.get("model_class") == MAMBA else {})


def pair(options: dict[str, Any]) -> tuple[Any, Any]:
    """Return a model whose loss is not fused, and one whose is, with the same weights."""
    return make(impl=None, **model_class(options)), make(**model_class(options))


def differences(one: tuple[Any, dict[str, Any]], other: tuple[Any, dict[str, Any]]) -> dict[str, float]:
    """Return the largest relative error of the loss and of a gradient, infinite where one has it and one has not."""
    losses = float((one[0] - other[0]).norm() / one[0].norm())
    errors = [0.0]
    for name, slope in one[1].items():
        against = other[1].get(name)
        if slope is None or against is None:
            errors.append(0.0 if slope is against else float("inf"))
        else:
            errors.append(float((slope - against).norm() / slope.norm().clamp(min=1e-12)))
    return {"loss": losses, "gradient": max(errors)}


def compare(options: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the differences between the two models of a case."""
    plain, fused = pair(options)
    given = inputs()
    report: dict[str, Any] = differences(step(plain, given, **more), step(fused, given, **more))
    report["layer"] = [type(model.output_layer).__name__ for model in (plain, fused)]
    report["shape"] = list(fused(**given).shape)
    report["names"] = list(plain.state_dict()) == list(fused.state_dict())
    report["parameters"] = sorted(dict(plain.named_parameters())) == sorted(dict(fused.named_parameters()))
    if not hybrid_model.STAND_IN:
        sharded = [model.sharded_state_dict() for model in (plain, fused)]
        report["sharded"] = described(sharded[0]) == described(sharded[1])
    return report


def described(sharded: dict[str, Any]) -> dict[str, str]:
    """Return the entries of a sharded state dict without their numbers."""
    fields = ("key", "global_shape", "global_offset", "replica_id", "allow_shape_mismatch", "dtype")
    return {
        name: str({field: getattr(entry, field, None) for field in fields}) for name, entry in sorted(sharded.items())
    }


def error_of(call: Any) -> str:
    """Return the error of a call, or an empty text."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        return f"{type(error).__name__}: {error}"
    return ""


def digest(seen: tuple[Any, dict[str, Any]]) -> str:
    """Return a hash of every bit of a step."""
    state = hashlib.sha256(seen[0].numpy().tobytes())
    for name, slope in sorted(seen[1].items()):
        state.update(name.encode() + (b"" if slope is None else slope.contiguous().numpy().tobytes()))
    return state.hexdigest()


def without_fusion() -> dict[str, str]:
    """Return hashes of steps whose loss is not fused by `linear`."""
    native = "" if hybrid_model.STAND_IN else "native"
    kinds = {"none": None, **({"native": native} if native else {})}
    return {
        f"{name}, {pattern}": digest(step(make(pattern, impl=impl), inputs()))
        for name, impl in kinds.items()
        for pattern in ("*-*-", "*-/*-")
    }


def logits(options: dict[str, Any]) -> bool:
    """Return whether both models make the same bits where there are no labels, in training and in evaluation."""
    given = {**inputs(), "labels": None}
    seen = []
    for model in pair(options):
        seen += [model(**given).detach(), model.eval()(**given, runtime_gather_output=True).detach()]
    return all(torch.equal(seen[0], each) for each in seen)


def checkpoints(options: dict[str, Any]) -> bool:
    """Return whether each model's state loads into the other, strictly, and gives the same loss."""
    plain, fused = pair(options)
    with torch.no_grad():
        for each in plain.parameters():
            each.mul_(1.5)
    first = fused(**inputs()).detach()
    fused.load_state_dict(copy.deepcopy(plain.state_dict()))
    second = fused(**inputs()).detach()
    back = make(impl=None, **options)
    back.load_state_dict(copy.deepcopy(fused.state_dict()))
    changed = not torch.allclose(first, second)
    return changed and torch.equal(back(**inputs()), plain(**inputs())) and torch.allclose(second, plain(**inputs()))


def calls_of_the_layer() -> dict[str, Any]:
    """Return the shape that a hook of the output layer sees for each call of the layer in a step without MTP."""
    model, shapes = make(), []
    model.output_layer.register_forward_hook(lambda layer, given, seen: shapes.append(list(seen.shape)))
    step(model, inputs())
    return {"shapes": shapes}


def positional() -> bool:
    """Return whether the arguments may be given by position."""
    model, given = make(), inputs()
    order = ("input_ids", "position_ids", "attention_mask")
    by_position = model(*(given[name] for name in order), None, given["labels"], None, None)
    return torch.equal(by_position, model(**given))


def inner_stage() -> dict[str, Any]:
    """Return the result of a model without an output layer that is called with labels."""
    model = make(stages={"pre_process": True, "post_process": False})
    return {"shape": list(model(**inputs()).shape), "has a layer": hasattr(model, "output_layer")}


def ignored() -> dict[str, Any]:
    """Return the losses of labels that are to be ignored, and whether the others are those of the plain model."""
    plain, fused = pair({})
    given = inputs()
    kept = torch.ones_like(given["labels"], dtype=torch.bool)
    kept[:, ::3] = False
    expected = plain(**given)[kept]
    given["labels"] = torch.where(kept, given["labels"], -100)
    seen = fused(**given)
    return {"ignored": float(seen[~kept].abs().max()), "kept": bool(torch.allclose(seen[kept], expected))}


def refusals() -> dict[str, str]:
    """Return the errors for output layers that cannot compute the loss, with the loss fused and not fused."""

    class Other(upstream.tensor_parallel.ColumnParallelLinear):
        pass

    with mock.patch.object(upstream.tensor_parallel, "ColumnParallelLinear", Other):
        foreign = error_of(make)
        unfused = error_of(lambda: make(impl=None))
    with mock.patch("megatron.core.fp8_utils.is_mxfp8_output_proj_active", return_value=True):
        mxfp8, mxfp8_unfused = error_of(make), error_of(lambda: make(impl=None))
    return {"foreign": foreign, "foreign, not fused": unfused, "mxfp8": mxfp8, "mxfp8, not fused": mxfp8_unfused}


def cache_is_kept() -> bool | None:
    """Return whether an attribute that forward sets on the model is there after a step that looked at a view."""
    model = make("*-/*-")
    model._decoder_hidden_states_cache = None
    if hybrid_model.STAND_IN:
        model(**inputs())
        return model._decoder_hidden_states_cache is not None
    from megatron.core.inference.utils import InferenceMode

    with InferenceMode.active(), torch.no_grad():
        seen = model.eval()(**{**inputs(), "labels": None}, runtime_gather_output=True)
    return model._decoder_hidden_states_cache is not None and seen.shape[-1] == hybrid_model.VOCABULARY


def ranked(request: dict[str, Any]) -> dict[str, Any]:
    """Return the differences between the two models on this rank."""
    return {name: compare(options) for name, options in RANKED.items()}


def main() -> None:
    """Answer on standard output."""
    request = json.loads(os.environ.get("HYBRID", "{}"))
    brief = "HYBRID_ONLY" in os.environ
    torch.use_deterministic_algorithms(True)
    hybrid_model.groups(**request)
    hybrid_model.let_the_cpu_compute_the_loss()
    if not hybrid_model.STAND_IN:
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        # It counts heads over the life of a process, which here has models with one and with two.
        MTPLossLoggingHelper.save_loss_to_tracker = lambda *given, **named: None
    records = {record.overlay.id: record for record in megacpp_overlays.audit().records}
    report: dict[str, Any] = {
        "decision": records["hybrid-linear-ce"].decision.value,
        "reason": records["hybrid-linear-ce"].reason,
        "dispatch": records["hopper-flce-dispatch"].decision.value,
    }
    with contextlib.redirect_stdout(sys.stderr):
        if request:
            report["cases"] = ranked(request)
        else:
            report["without fusion"] = {} if brief else without_fusion()
            report["step"] = error_of(lambda: step(make(), inputs()))
            report["step with MTP"] = error_of(lambda: step(make("*-/*-"), inputs()))
        if not request and not brief and report["decision"] == "active":
            report["cases"] = {name: compare(options) for name, options in CASES.items()}
            report["without labels"] = {name: logits(options) for name, options in CASES.items()}
            report["checkpoints"] = {
                name: checkpoints(options) for name, options in CASES.items() if "model_class" not in options
            }
            report["labels of MTP from tokens"] = {
                name: differences(*(step(model, {**inputs(), "labels": None}) for model in pair(CASES[name])))
                for name in CASES
                if "/" in CASES[name].get("pattern", "") and "model_class" not in CASES[name]
            }
            report["masked"] = compare(CASES["MTP"], loss_mask=masked())
            report["calls"], report["positional"] = calls_of_the_layer(), positional()
            report["inner stage"], report["ignored"], report["refusals"] = inner_stage(), ignored(), refusals()
            report["cache"] = cache_is_kept()
    torch.distributed.destroy_process_group()
    sys.stdout.write(json.dumps(report))


def masked() -> Any:
    """Return a mask that leaves out some tokens."""
    mask = torch.ones(hybrid_model.BATCH, hybrid_model.SEQUENCE)
    mask[:, ::4] = 0
    return mask


if __name__ == "__main__":
    main()
