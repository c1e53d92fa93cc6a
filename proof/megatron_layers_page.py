"""The section of a proof's page about models with every type of layer."""

from __future__ import annotations

from claims import Found
from megatron_launcher import ended
from megatron_layers import OURS, STOCK
from megatron_layers_sizes import KERNELS, LATENT
from megatron_page import by_decision
from report import table

WHERE = {
    "cpu": (
        "On a CPU: `proof/on_cpu_interpreted` answers for CUDA, and every Triton kernel, of mamba-ssm, of fla and of overlays, runs in",
        "Triton's interpreter.",
    ),
    "gpu": ("On a GPU.",),
}


def layers(found: Found) -> list[str]:
    """Return the lines of the section."""
    checkout = found["checkout"]
    versions = ", ".join(f"{name} {version or 'is not installed'}" for name, version in found["packages"].items())
    lines = [
        "## Every type of layer",
        "",
        f"`pretrain_hybrid.py` of Megatron-LM {checkout['version']}, commit {checkout['commit']}, as it is, in bfloat16:",
        "M is Mamba-2, G a gated delta net, D sparse attention, + latent attention, \\* softmax attention, - an MLP, E experts, and behind",
        "the slash are the layers that predict a second token. All in Megatron's local modules (`proof/launchers/every_layer_stack.py`).",
        "In `hybrid_stack_spec` a gated delta net computes by lines in PyTorch that Megatron has for deterministic runs, in",
        "`with_kernels` by fla's kernels; it normalizes by fla's kernel in both.",
        *WHERE[found["host"]],
        "",
        f"- Packages: {versions}",
        *(f"- SHA-256 of `{name}`: `{digest}`" for name, digest in found["inputs"].items()),
    ]
    for name, model in found["models"].items():
        lines += ["", f"### `{model['pattern']}` of `{model['spec']}`", "", *_losses(model["runs"])]
        if name != KERNELS.id:  # whose other arguments are those of the first
            lines += ["", "Its arguments:", "", "```", " ".join(model["arguments"]), "```"]
    run = found["models"][LATENT.id]["runs"][OURS]
    if "decisions" in run:
        lines += ["", "Decisions in the first of them:", "", *by_decision(run)]
    return lines


def _losses(runs: Found) -> list[str]:
    stopped = [f"- {way}: {ended(run)}, after {run['steps']} steps" for way, run in runs.items() if "error" in run]
    if stopped:
        return stopped
    heads = [f"{name}, {way}" for name in ("loss", "grad norm") for way in (STOCK, OURS)]
    columns = [runs[way][series] for series in ("losses", "norms") for way in (STOCK, OURS)]
    rows = [
        [str(step), *(f"{each:.6g}" for each in row)] for step, row in enumerate(zip(*columns, strict=True), start=1)
    ]
    return table(["step", *heads], rows)
