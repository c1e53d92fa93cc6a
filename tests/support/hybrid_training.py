"""Run in a fresh interpreter: train a hybrid model with Mamba layers on a GPU, fused compared with not fused; JSON.

    HYBRID_TRAINING='{"steps": 20}' PYTHONPATH=tree:. python tests/support/hybrid_training.py

In lockstep, three models take each step from the same weights, those of the fused one: the fused model, the plain one,
and one that computes logits and loss in float32 from the same bf16 hidden states and weight. The third is the truth that the
errors of the others are measured against. Then the fused and the plain model train on their own from one seed; their
losses, times and memory are kept. The optimizer is AdamW over float32 copies of the weights; the data are two
batches of random tokens by turns, which a model can learn by heart.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

import torch

import megacpp_overlays

# isort: split
import hybrid_model
from hybrid_model import make

DEFAULTS: dict[str, Any] = {
    "pattern": "M-M*M-M*",
    "hidden": 1024,
    "vocabulary": 131072,
    "sequence": 2048,
    "batch": 2,
    "lockstep": 4,
    "steps": 20,
    "seconds": 100.0,
}


class Training:
    """A model and its optimizer."""

    def __init__(self, request: dict[str, Any], impl: str | None, pattern: str) -> None:
        self.request = request
        self.model = make(
            pattern,
            impl=impl,
            sizes={name: request[name] for name in ("hidden", "vocabulary", "sequence")},
            num_attention_heads=max(request["hidden"] // 128, 1),
            params_dtype=torch.bfloat16,
            bf16=True,
            mamba_state_dim=min(128, request["hidden"] // 4),
            mamba_head_dim=min(64, request["hidden"] // 8),
            mamba_num_groups=1,
            # The other path wants the compiled causal_conv1d.
            use_mamba_mem_eff_path=False,
        )
        self.masters = [each.detach().float() for each in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=3e-4, weight_decay=0.0)

    def step(self, number: int) -> tuple[Any, dict[str, Any]]:
        """Return the losses of one step, and every gradient."""
        given = hybrid_model.inputs(
            number % 2, **{name: self.request[name] for name in ("vocabulary", "sequence", "batch")}
        )
        for each in self.model.parameters():
            each.grad = None
        losses = self.model(**given)
        losses.float().mean().backward()
        return losses.detach().float(), {name: each.grad for name, each in self.model.named_parameters()}

    def update(self) -> None:
        """Take the step of the optimizer."""
        for master, each in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = each.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for master, each in zip(self.masters, self.model.parameters(), strict=True):
                each.copy_(master)
                master.grad = None


def exact(training: Training) -> Training:
    """Return the training with an output layer whose logits are float32."""
    layer = training.model.output_layer

    def forward(hidden: Any, weight: Any = None, runtime_gather_output: Any = None) -> tuple[Any, None]:
        weight = layer.weight if weight is None else weight
        return torch.nn.functional.linear(hidden.float(), weight.float()), None

    layer.forward = forward
    return training


def relative(found: Any, true: Any) -> float:
    """Return the relative error in the Frobenius norm."""
    return float((found.double() - true.double()).norm() / true.double().norm())


def lockstep(request: dict[str, Any], pattern: str) -> list[dict[str, Any]]:
    """Return the errors of both losses and both sets of gradients at each step."""
    fused, plain, truth = (
        Training(request, "linear", pattern),
        Training(request, None, pattern),
        Training(request, None, pattern),
    )
    exact(truth)
    seen = []
    for number in range(request["lockstep"]):
        for other in (plain, truth):
            other.model.load_state_dict(fused.model.state_dict())
        true = truth.step(number)
        line: dict[str, Any] = {"loss": float(true[0].mean())}
        for name, training in (("fused", fused), ("plain", plain)):
            losses, slopes = training.step(number)
            errors = {parameter: relative(slopes[parameter], slope) for parameter, slope in true[1].items()}
            worst = max(errors, key=lambda each: errors[each])
            line[name] = {
                "loss": float(losses.mean()),
                "losses": relative(losses, true[0]),
                "mean gradient": statistics.fmean(errors.values()),
                "worst gradient": errors[worst],
                "worst": worst,
                "output layer": errors["output_layer.weight"],
            }
        seen.append(line)
        fused.update()
    return seen


def alone(request: dict[str, Any], impl: str | None, pattern: str) -> dict[str, Any]:
    """Return losses, time and memory of a training on its own."""
    cuda = torch.cuda.is_available()
    training = Training(request, impl, pattern)
    losses, times = [], []
    until = time.monotonic() + request["seconds"] / 4
    for number in range(request["steps"]):
        if cuda and number == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss, _ = training.step(number)
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        training.update()
        losses.append(float(loss.mean()))
        if time.monotonic() > until:
            break
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0
    del training
    if cuda:
        torch.cuda.empty_cache()
    return {"losses": losses, "step ms": 1000 * statistics.median(times[2:] or times), "peak MiB": peak}


def main() -> None:
    """Answer on standard output."""
    request = {**DEFAULTS, **json.loads(os.environ.get("HYBRID_TRAINING", "{}"))}
    torch.backends.cuda.matmul.allow_tf32 = False
    hybrid_model.groups(backend="nccl" if torch.cuda.is_available() else "gloo")
    if not torch.cuda.is_available():
        hybrid_model.let_the_cpu_compute_the_loss()
    if "M" in request["pattern"]:
        from megatron.core.ssm import mamba_mixer

        assert mamba_mixer.HAVE_MAMBA_SSM, "mamba-ssm cannot be imported"
    hybrid_model.take_one_configuration()
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.save_loss_to_tracker = lambda *given, **named: None
    pattern = request["pattern"]
    records = {record.overlay.id: record for record in megacpp_overlays.audit().records}
    report: dict[str, Any] = {
        "request": request,
        "decisions": {name: records[name].decision.value for name in ("hybrid-linear-ce", "hopper-flce-dispatch")},
        "lockstep": {each: lockstep(request, each) for each in (pattern, f"{pattern}/*-")},
    }
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    report["alone"] = {name: alone(request, impl, pattern) for name, impl in (("plain", None), ("fused", "linear"))}
    report["layers"] = sorted({type(each).__name__ for each in make_names(request)})
    sys.stdout.write(json.dumps(report))


def make_names(request: dict[str, Any]) -> list[Any]:
    """Return the modules of one small model of this pattern."""
    small = {**request, "hidden": 128, "vocabulary": 256, "sequence": 16}
    return list(Training(small, "linear", request["pattern"]).model.modules())


if __name__ == "__main__":
    main()
