"""Cost to a run of Mamba state that goes on from one packed document into the next (overlay mamba-packed-seq-idx).

    python benchmarks/packed_documents/run.py --json FILE --write FILE.md --plot FILE.svg
    python benchmarks/packed_documents/run.py --device cpu --steps 150 ...    reduced, on any host
    python benchmarks/packed_documents/run.py --page FILE.json --write FILE.md --plot FILE.svg    make the page again

One model is trained without the overlay and one with it, from the same numbers on the same documents; a third is trained
without the overlay by a caller who gives `total_tokens`, and must get the results of the second. They begin from nothing, and
once more from a model that has learnt from documents alone, as when an existing model is tuned on packed rows. All are
tested on documents that they have not seen, packed as in training and each alone, as a model is used. Needs megatron-core
0.19, mamba-ssm (any build) and einops, and no Transformer Engine; causal-conv1d is used where it is installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # parts are named from the folder of all benchmarks
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import statistics
import time
from datetime import datetime, timezone
from typing import Any

from packed_documents import page as report_page

OVERLAY = "mamba-packed-seq-idx"
WAYS = ("without", "with", "told")
DISTRIBUTIONS = ("torch", "triton", "megatron-core", "mamba-ssm", "causal-conv1d")
HELD_OUT = 10**6


def main() -> None:
    """Train on this host, and write the files that the command line asks for."""
    parser = argparse.ArgumentParser(description="Mamba state across packed documents, with the overlay and without.")
    parser.add_argument("--page", type=Path, help="make the page of these results; measure nothing")
    parser.add_argument("--json", type=Path, help="keep the results in this file")
    parser.add_argument("--write", type=Path, help="keep the page in this file")
    parser.add_argument("--plot", type=Path, help="keep the loss curves in this file, as SVG")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="a GPU if there is one")
    parser.add_argument("--steps", type=int, default=1500, help="of each training run on packed rows")
    parser.add_argument("--first", type=int, default=3000, help="steps on documents alone, of the model to be tuned")
    parser.add_argument("--every", type=int, default=25, help="steps between two looks at other documents")
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    if chosen.page:
        found = json.loads(chosen.page.read_text())
    else:
        found = measure(chosen.device, chosen.steps, chosen.first, chosen.every, chosen.seeds)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    page = report_page.markdown(found)
    print(page)
    if chosen.write:
        chosen.write.write_text(page)
    if chosen.plot:
        chosen.plot.write_text(report_page.svg(found))


def measure(device: str | None, steps: int, first: int, every: int, seeds: int) -> dict[str, Any]:
    """Return the curves of every way and seed."""
    import megacpp_overlays

    # isort: split
    import torch
    from packed_documents import work

    began = time.monotonic()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    size = work.GPU if device == "cuda" else work.CPU
    if device == "cpu":
        torch.set_num_threads(1)
    work.prepare(device)
    states = {record.overlay.id: record.decision.value for record in megacpp_overlays.audit().records}
    if states[OVERLAY] != "active":
        raise SystemExit(f"{OVERLAY} is {states[OVERLAY]} here")
    host: dict[str, Any] = {"machine": platform.machine(), "python": platform.python_version()}
    if device == "cuda":
        host["gpu"] = torch.cuda.get_device_name()
    runs = []
    for seed in range(1, seeds + 1):
        learnt = train(size, device, first, max(first, 1), seed, rows="alone")
        run: dict[str, Any] = {"seed": seed, "first": learnt["looks"][-1]}
        for start, numbers in (("from nothing", None), ("tuned", learnt["numbers"])):
            run[start] = {}
            for way in WAYS:
                if way == "with":
                    megacpp_overlays.arm()
                else:
                    megacpp_overlays.undo(OVERLAY)
                found = train(
                    size, device, steps, every, seed, rows="told" if way == "told" else "packed", start=numbers
                )
                del found["numbers"]
                run[start][way] = found
                print(f"seed {seed}, {start}, {way}: {found['looks'][-1]}", file=sys.stderr, flush=True)
        runs.append(run)
    megacpp_overlays.arm()
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "host": host,
        "versions": {name: _version(name) for name in DISTRIBUTIONS},
        "device": device,
        "size": dataclasses.asdict(size) | {"document": size.document, "row": size.document * size.documents},
        "pattern": work.PATTERN,
        "steps": steps,
        "first": first,
        "runs": runs,
        "seconds": round(time.monotonic() - began),
    }


def train(
    size: Any, device: str, steps: int, every: int, seed: int, *, rows: str, start: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train one model as the overlay now is; return a hash of its losses, its answers about other documents, and its parameters.

    Args:
        size: of the model and its documents.
        device: where it is trained.
        steps: of training.
        every: after how many steps it is asked about other documents.
        seed: of its numbers and of its documents.
        rows: `packed`, `told`, which is packed with `total_tokens` given, or `alone`, each document in a row of its own.
        start: numbers to begin with.
    """
    import torch
    from packed_documents import work

    trained = work.model(size, device, seed)
    if start is not None:
        trained.load_state_dict(start)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=size.rate, weight_decay=0.0)
    other = work.documents(size, 2 * size.documents, HELD_OUT + seed, device)
    halves = [[part[place::2] for part in other] for place in range(2)]
    # Documents of training on rows are not those that the model to be tuned has learnt from.
    stream = 100_000 * seed + (50_000 if rows == "alone" else 0)

    def params() -> Any:
        return None if rows == "alone" else work.packed(size, device, told=rows == "told")

    losses: list[float] = []
    looks: list[dict[str, float]] = []
    began = time.monotonic()
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            with work.held_still(trained):
                packed = [work.answer(trained, *half, params()) for half in halves]
                alone = [work.answer(trained, *half) for half in halves]
            looks.append(
                {
                    "step": step,
                    "packed loss": sum(float(each.loss) for each in packed) / 2,
                    "packed right": sum(each.right for each in packed) / 2,
                    "alone loss": sum(float(each.loss) for each in alone) / 2,
                    "alone right": sum(each.right for each in alone) / 2,
                    "row loss": statistics.fmean(losses[-every:]) if losses else None,
                }
            )
        if step == steps:
            break
        data = work.documents(size, size.documents, stream + step, device)
        optimizer.zero_grad(set_to_none=True)
        found = work.answer(trained, *data, params())
        found.loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        losses.append(float(found.loss.detach()))
    numbers = {name: value.detach().clone() for name, value in trained.state_dict().items() if value is not None}
    return {
        "first loss": losses[0] if losses else None,
        "bits": hashlib.sha256(" ".join(each.hex() for each in losses).encode()).hexdigest()[:16],
        "looks": looks,
        "seconds": round(time.monotonic() - began, 1),
        "numbers": numbers,
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
