"""Effects of keeping A_log and D of Megatron's own Mamba mixers in fp32 (overlay float16-mixer-parameters).

    MEGACPP_OVERLAY_FLOAT16_MIXER_PARAMETERS=on python benchmarks/mixer_parameters/run.py --json FILE --write FILE.md
    python benchmarks/mixer_parameters/run.py --page FILE.json --write FILE.md    make the page again, on any host

Without a CUDA device only the rounding is measured. The rest needs megatron-core, mamba-ssm (any build), einops and
psutil, and no Transformer Engine.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # parts are named from the folder of all benchmarks
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import platform
import tempfile
import time
from datetime import datetime, timezone
from typing import Any

from mixer_parameters import page as report_page
from mixer_parameters import rounding
from mixer_parameters.work import Model, Size, make_importable, start, take_one_configuration, tokens

DISTRIBUTIONS = ("torch", "triton", "megatron-core", "mamba-ssm")
HELD_OUT = 1000
LAST = 50
"""Steps at the end of a run over which differences of losses are taken."""


def main() -> None:
    """Run the measurements that this host can, and write the files that the command line asks for."""
    parser = argparse.ArgumentParser(description="A_log and D of Megatron's Mamba mixers in fp32 and in bf16.")
    parser.add_argument("--page", type=Path, help="make the page of these results; measure nothing")
    parser.add_argument("--json", type=Path, help="keep the results in this file")
    parser.add_argument("--write", type=Path, help="keep the page in this file")
    parser.add_argument("--steps", type=int, default=200, help="of each training run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=100, help="no further seed after this many seconds")
    chosen = parser.parse_args()
    found = json.loads(chosen.page.read_text()) if chosen.page else measure(chosen.steps, chosen.seeds, chosen.limit)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")
    page = report_page.markdown(found)
    print(page)
    if chosen.write:
        chosen.write.write_text(page)


def measure(steps: int, seeds: int, limit: float) -> dict[str, Any]:
    """Return everything that this host can measure."""
    import torch

    began = time.monotonic()
    found: dict[str, Any] = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "host": {"machine": platform.machine(), "python": platform.python_version()},
        "rounding": rounding.measure(),
    }
    if torch.cuda.is_available():
        found["host"]["gpu"] = torch.cuda.get_device_name()
        with tempfile.TemporaryDirectory() as folder:
            found |= on_gpu(Path(folder), Size(), "cuda", steps, seeds, limit)
    found["versions"] = {name: _version(name) for name in DISTRIBUTIONS}
    found["seconds"] = round(time.monotonic() - began)
    return found


def on_gpu(folder: Path, size: Size, device: Any, steps: int, seeds: int, limit: float) -> dict[str, Any]:
    """Return the measurements that need the kernels: checkpoints, gradients and training."""
    began = time.monotonic()
    make_importable()
    import megacpp_overlays

    importlib.import_module("megatron.core.ssm.mamba_mixer")

    take_one_configuration()
    states = {
        record.overlay.id: record.decision.value
        for record in megacpp_overlays.audit().records
        if record.overlay.id.startswith("float16-") and record.decision.value != "absent"
    }
    start(str(folder))
    runs = []
    for seed in range(1, seeds + 1):
        if seed > 1 and time.monotonic() - began > limit:
            break
        runs.append(train(size, device, steps, seed))
    from mixer_parameters import checkpoints

    small = dataclasses.replace(size, length=128, batch=2)
    return {
        "overlays": states,
        "size": dataclasses.asdict(size),
        "steps": steps,
        "training": runs,
        "checkpoints": checkpoints.measure(folder, small, device),
    }


def train(size: Size, device: Any, steps: int, seed: int) -> dict[str, Any]:
    """Train in every mode from the same numbers on the same data, `kept` twice; compare with fp32."""
    kept = Model("kept", size, seed=seed)
    models = {
        "fp32": Model("fp32", size, seed=seed, state=kept.start),
        "cast": Model("cast", size, seed=seed, state=kept.start),
        "kept": kept,
        "kept again": Model("kept", size, seed=seed, state=kept.start),
    }
    held_out = tokens(size, seed=HELD_OUT + seed, device=device)
    found: dict[str, Any] = {"seed": seed, "at the start": _against_fp32(models, held_out)}
    losses: dict[str, list[float]] = {name: [] for name in models}
    for step in range(steps):
        data = tokens(size, seed=10_000 * seed + step, device=device)
        for name, model in models.items():
            losses[name].append(model.step(data))
    found["last losses"] = {name: sum(values[-LAST:]) / len(values[-LAST:]) for name, values in losses.items()}
    pairs = {"cast": ("cast", "fp32"), "kept": ("kept", "fp32"), "kept again": ("kept again", "kept")}
    found["differences of losses"] = {
        name: sum(abs(a - b) for a, b in zip(losses[one][-LAST:], losses[other][-LAST:], strict=True))
        / len(losses[one][-LAST:])
        for name, (one, other) in pairs.items()
    }
    exempt = dict(models["fp32"].exempt())
    found["moved"] = {
        which: max(
            float((value.detach() - kept.start[name]).abs().max())
            for name, value in exempt.items()
            if name.endswith(which)
        )
        for which in ("A_log", "D")
    }
    trained = {name: value.detach().clone() for name, value in models["fp32"].inner.named_parameters()}
    for name in ("cast", "kept"):
        models[name] = Model(name, size, seed=seed, state=trained)
    found["at the end of fp32"] = _against_fp32(models, held_out)
    return found


def _against_fp32(models: dict[str, Model], held_out: Any) -> dict[str, Any]:
    """Return how far losses and gradients of both bf16 models are from those of fp32 with the same parameters."""
    import torch

    def seen(model: Model) -> tuple[Any, dict[str, Any]]:
        with torch.no_grad():
            losses = model.losses(held_out).double().cpu()
        return losses, model.gradients(held_out)

    losses, gradients = seen(models["fp32"])
    found: dict[str, Any] = {"loss in fp32": float(losses.mean())}
    for name in ("cast", "kept"):
        theirs, other = seen(models[name])
        found[name] = {"loss of a token": float((theirs - losses).pow(2).mean().sqrt())}
        for which in ("A_log", "D"):
            pairs = [(other[key], value) for key, value in gradients.items() if key.endswith(which)]
            off = sum(float((a - b).pow(2).sum()) for a, b in pairs)
            found[name][f"gradient of {which}"] = (off / sum(float(b.pow(2).sum()) for _, b in pairs)) ** 0.5
    return found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
