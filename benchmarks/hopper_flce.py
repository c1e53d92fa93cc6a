"""What the portable entry costs: Megatron's fused linear cross entropy beside plain PyTorch, on a GPU.

    python benchmarks/hopper_flce.py [--tree PATH] [--write benchmarks/hopper_flce.md]

PATH holds megatron/, a checkout of Megatron-LM dev; without it our stand-in is used, which calls the same entry. Every
row is a fresh process on the same GPU. Times are medians, of the forward pass and of forward and backward together;
memory is the peak above what the inputs and their gradients take; errors are of the gradients against float64, relative to
the largest value.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import timing

ROOT = Path(__file__).resolve().parent.parent
STAND_IN = ROOT / "tests/stand_ins/dev-linear-cross-entropy"
SHAPES = ((8192, 4096, 131072), (4096, 2048, 32000))
ROWS = (("portable entry", "fused"), ("plain PyTorch, logits in float32", "float32"), ("plain PyTorch", "plain"))
WARM_UP, ROUNDS = 3, 15


def main() -> None:
    """Measure every row and print the table."""
    parser = argparse.ArgumentParser(description="Cost of the portable fused linear cross entropy on a GPU.")
    parser.add_argument("--tree", type=Path, default=STAND_IN, help="folder with megatron/ of Megatron-LM dev")
    parser.add_argument("--write", type=Path, help="also write the page with host and versions to this file")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.row:
        print(json.dumps(measure(chosen.row[0], tuple(map(int, chosen.row[1].split("x"))))))
        return
    lines = [*head(chosen.tree), *(line for shape in SHAPES for line in table(shape, chosen.tree))]
    if chosen.write:
        chosen.write.write_text("\n".join(lines) + "\n")


def head(tree: Path) -> list[str]:
    """Return the title, how to read the page, and where it was measured."""
    return [
        "# The portable entry of Megatron's fused linear cross entropy",
        "",
        'Written by `benchmarks/hopper_flce.py`. bfloat16, `reduction="none"`, a random gradient for each token. Memory',
        "is the peak above inputs and gradients; errors are of the gradients against float64, over the largest value.",
        "",
        *timing.where(),
        f"- Megatron: {'a stand-in for dev' if tree == STAND_IN else tree.name}",
    ]


def table(shape: tuple[int, int, int], tree: Path) -> list[str]:
    """Measure every row at one shape; return the section, and print it as it grows."""
    lines = [
        "",
        f"## {shape[0]} tokens, hidden {shape[1]}, vocabulary {shape[2]}",
        "",
        "| | forward ms | forward and backward ms | peak MiB | error, hidden | error, weight |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for label, kind in ROWS:
        found = in_a_process(kind, shape, tree)
        times = f"{found['forward']:.1f} | {found['both']:.1f} | {found['peak_mib']:.0f}"
        lines.append(f"| {label} | {times} | {found['hidden']:.1e} | {found['weight']:.1e} |")
        print(lines[-1], flush=True)
    return lines


def in_a_process(kind: str, shape: tuple[int, ...], tree: Path) -> dict[str, Any]:
    """Measure one row in a fresh interpreter."""
    path = os.pathsep.join([str(tree.resolve()), str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "MEGACPP_OVERLAYS_LOG": "logging"}
    command = [sys.executable, "-W", "ignore", __file__, "--row", kind, "x".join(map(str, shape))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{kind}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(kind: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Time forward and backward, read the peak, and compare the gradients with float64."""
    import torch

    tokens, size, vocabulary = shape
    torch.manual_seed(0)
    hidden = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocabulary, size, device="cuda") / size**0.5).bfloat16().requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device="cuda")
    arriving = torch.rand(tokens, device="cuda") / tokens
    loss = per_token_loss(kind)

    forward, both = [], []
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for attempt in range(WARM_UP + ROUNDS):
        hidden.grad = weight.grad = None
        marks = timing.marked((lambda: loss(hidden, weight, labels), lambda losses: losses.backward(arriving)))
        torch.cuda.synchronize()
        if attempt >= WARM_UP:
            taken = timing.elapsed_ms(marks)
            forward.append(taken[0])
            both.append(sum(taken))
    kept = sum(tensor.numel() * tensor.element_size() for tensor in (hidden, weight)) * 2
    peak = torch.cuda.max_memory_allocated() - kept
    expected = true_gradients(hidden, weight, labels, arriving)
    errors = {
        name: timing.relative_error(leaf.grad, true)
        for name, leaf, true in zip(("hidden", "weight"), (hidden, weight), expected, strict=True)
    }
    return {"forward": median(forward), "both": median(both), "peak_mib": peak / 2**20, **errors}


def per_token_loss(kind: str) -> Any:
    """Return a function from (hidden, weight, labels) to the loss of each token."""
    from torch.nn import functional

    if kind == "float32":
        return lambda hidden, weight, labels: functional.cross_entropy(
            (hidden @ weight.t()).float(), labels, reduction="none"
        )
    if kind == "plain":
        return lambda hidden, weight, labels: functional.cross_entropy(
            hidden @ weight.t(), labels, reduction="none"
        ).float()
    import megacpp_overlays  # before Megatron

    # isort: split
    from megatron.core.fusions.fused_linear_cross_entropy import linear_cross_entropy

    record = next(r for r in megacpp_overlays.audit().records if r.overlay.id == "hopper-flce-dispatch")
    if record.decision.value != "active":
        sys.exit(f"the overlay is {record.decision.value}: {record.reason}")
    return lambda hidden, weight, labels: linear_cross_entropy(hidden, weight, labels, reduction="none")


def true_gradients(hidden: Any, weight: Any, labels: Any, arriving: Any) -> tuple[Any, Any]:
    """Return the gradients in float64, a slice of tokens at a time."""
    import torch

    wide = weight.detach().double()
    for_hidden, for_weight = torch.empty_like(hidden, dtype=torch.float64), torch.zeros_like(wide)
    for start in range(0, hidden.shape[0], 1024):
        rows = slice(start, start + 1024)
        slope = torch.softmax(hidden[rows].detach().double() @ wide.t(), dim=1)
        slope[torch.arange(slope.shape[0], device=slope.device), labels[rows]] -= 1
        slope *= arriving[rows, None]
        for_hidden[rows] = slope @ wide
        for_weight += slope.t() @ hidden[rows].detach().double()
    return for_hidden, for_weight


if __name__ == "__main__":
    main()
