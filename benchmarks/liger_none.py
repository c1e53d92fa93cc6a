"""What per-token gradients cost: Liger's fused linear cross entropy, reduction="none" under a random mask, on a GPU.

    python benchmarks/liger_none.py [--write benchmarks/liger_none.md]

Every row is a fresh process on the same GPU: upstream as it is, the same release with the overlay, the first release
that is right by itself, and plain PyTorch. Wheels come from .cache/wheels (`make wheels`). Times are medians of
forward and backward together; memory is the peak above what the inputs and their gradients take; errors are of the
gradients against float64, relative to the largest value.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from statistics import median
from typing import Any

import timing

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ((8192, 4096, 131072), (4096, 2048, 32000))
ROWS = (
    ("liger-kernel 0.8.1 as it is", "0.8.1", "off"),
    ("liger-kernel 0.8.1, overlay active", "0.8.1", "auto"),
    ("liger-kernel 0.8.5, overlay retired", "0.8.5", "auto"),
    ("plain PyTorch", "", "off"),
)
WARM_UP, ROUNDS = 3, 15


def main() -> None:
    """Measure every row and print the table."""
    parser = argparse.ArgumentParser(description="Cost of per-token gradients on a GPU.")
    parser.add_argument("--write", type=Path, help="also write the page with host and versions to this file")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.row:
        print(json.dumps(measure(chosen.row[0], tuple(map(int, chosen.row[1].split("x"))), chosen.row[2])))
        return
    lines = [*head(), *(line for shape in SHAPES for line in table(shape))]
    if chosen.write:
        chosen.write.write_text("\n".join(lines) + "\n")


def head() -> list[str]:
    """Return the title, how to read the page, and where it was measured."""
    return [
        "# Per-token gradients of Liger's fused linear cross entropy",
        "",
        'Written by `benchmarks/liger_none.py`. Forward and backward, `reduction="none"`, a random mask of one half,',
        "bfloat16. Memory is the peak above inputs and gradients; errors are of the gradients against float64, over",
        "the largest value.",
        "",
        *timing.where(),
    ]


def table(shape: tuple[int, int, int]) -> list[str]:
    """Measure every row at one shape; return the section, and print it as it grows."""
    lines = [
        "",
        f"## {shape[0]} tokens, hidden {shape[1]}, vocabulary {shape[2]}",
        "",
        "| | ms | peak MiB | error, input | error, weight |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for label, version, mode in ROWS:
        found = in_a_process(version, mode, shape)
        numbers = f"{found['ms']:.1f} | {found['peak_mib']:.0f} | {found['input']:.1e} | {found['weight']:.1e}"
        lines.append(f"| {label} | {numbers} |")
        print(lines[-1], flush=True)
    return lines


def in_a_process(version: str, mode: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Measure one row in a fresh interpreter with one release of liger-kernel first on its path."""
    with tempfile.TemporaryDirectory() as folder:
        if version:
            wheel = next((ROOT / ".cache/wheels").glob(f"liger_kernel-{version}-*.whl"))
            zipfile.ZipFile(wheel).extractall(folder)
        path = os.pathsep.join([folder, str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, "MEGACPP_OVERLAYS": mode, "MEGACPP_OVERLAYS_LOG": "logging"}
        command = [sys.executable, "-W", "ignore", __file__, "--row", version, "x".join(map(str, shape)), mode]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{version} {mode}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(version: str, shape: tuple[int, ...], mode: str) -> dict[str, Any]:
    """Time forward and backward, read the peak, and compare the gradients with float64."""
    import megacpp_overlays  # before liger-kernel

    # isort: split
    import torch

    tokens, hidden, vocabulary = shape
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden, device="cuda") / hidden**0.5).bfloat16().requires_grad_()
    target = torch.randint(0, vocabulary, (tokens,), device="cuda")
    mask = (torch.rand(tokens, device="cuda") < 0.5).float() / tokens
    loss = per_token_loss(version)

    def step() -> None:
        x.grad = weight.grad = None
        (loss(x, weight, target) * mask).sum().backward()

    times = []
    for attempt in range(WARM_UP + ROUNDS):
        torch.cuda.reset_peak_memory_stats()
        marks = timing.marked((step,))
        torch.cuda.synchronize()
        if attempt >= WARM_UP:
            times += timing.elapsed_ms(marks)
    kept = sum(tensor.numel() * tensor.element_size() for tensor in (x, weight)) * 2
    peak = torch.cuda.max_memory_allocated() - kept
    decisions = {record.overlay.id: record.decision.value for record in megacpp_overlays.audit().records}
    expected = dict(zip(("input", "weight"), true_gradients(x, weight, target, mask), strict=True))
    found = {"input": x.grad, "weight": weight.grad}
    errors = {name: timing.relative_error(found[name], expected[name]) for name in found}
    decision = decisions["liger-flce-none-backward"] if version else "-"
    if mode != "off" and version and decision not in {"active", "retired"}:
        sys.exit(f"the overlay is {decision}: {megacpp_overlays.audit()}")
    return {"ms": median(times), "peak_mib": peak / 2**20, "decision": decision, **errors}


def per_token_loss(version: str) -> Any:
    """Return a function from (x, weight, target) to the loss of each token."""
    if version:
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

        fused = LigerFusedLinearCrossEntropyLoss(reduction="none")
        return lambda x, weight, target: fused(weight, x, target)
    from torch.nn import functional

    return lambda x, weight, target: functional.cross_entropy((x @ weight.t()).float(), target, reduction="none")


def true_gradients(x: Any, weight: Any, target: Any, mask: Any) -> tuple[Any, Any]:
    """Return the gradients in float64, a slice of tokens at a time."""
    import torch

    wide = weight.detach().double()
    grad_x, grad_weight = torch.empty_like(x, dtype=torch.float64), torch.zeros_like(wide)
    for start in range(0, x.shape[0], 1024):
        rows = slice(start, start + 1024)
        probability = torch.softmax(x[rows].detach().double() @ wide.t(), dim=1)
        probability[torch.arange(probability.shape[0], device=x.device), target[rows]] -= 1
        probability *= mask[rows, None]
        grad_x[rows] = probability @ wide
        grad_weight += probability.t() @ x[rows].detach().double()
    return grad_x, grad_weight


if __name__ == "__main__":
    main()
