"""Run in a fresh interpreter: Mamba-2's kernels, interpreted, where their tensors are taken in parts; JSON.

    TRITON_INTERPRET=1 python tests/support/long_offsets.py

The release is the one that is first on the path. The limit of 2**31 elements is lowered to a number that a few tokens reach, and each
way is compared with the same calls below the limit. The reproducer of the pack shows results over 2**31.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import megacpp_overlays

# isort: split
import torch

from megacpp_overlays.kernels.mamba2.packed_reference import provide_causal_conv1d
from megacpp_overlays.overlays import mamba2_int32_offsets as seams

ID = "mamba2-int32-offsets"
ROWS, TOKENS, HEADS, WIDTH, STATE, CHUNK = 2, 32, 1, 16, 16, 16
DIM = HEADS * WIDTH
CHANNELS = DIM + 2 * STATE
PROJECTION = 2 * DIM + 2 * STATE + HEADS


def prepare() -> ModuleType:
    """Import the kernels past mamba-ssm's package, for a host without a GPU."""
    spec = importlib.util.find_spec("mamba_ssm")
    package = ModuleType("mamba_ssm")
    package.__path__ = list((spec and spec.submodule_search_locations) or ())
    package.__version__ = importlib.metadata.version("mamba-ssm")  # type: ignore[attr-defined]
    sys.modules["mamba_ssm"] = package
    provide_causal_conv1d()
    torch.cuda.device = contextlib.nullcontext  # type: ignore[assignment, misc]
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=1)
    module = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    for name, each in list(sys.modules.items()):
        for kernel in vars(each).values() if name.startswith("mamba_ssm.ops.triton") else ():
            while kernel is not None and not hasattr(kernel, "configs"):
                kernel = getattr(kernel, "fn", None)
            if len(getattr(kernel, "configs", ())) > 1:
                kernel.configs = [max(kernel.configs, key=lambda one: (math.prod(one.kwargs.values()), str(one)))]
    return module


def scan(module: ModuleType, **more: Any) -> list[Any]:
    """Return the output, final states and gradients of a scan of two rows, all arguments views of one projection."""
    numbers = torch.Generator().manual_seed(1)
    wide = torch.randn(ROWS, TOKENS, 3 * PROJECTION, generator=numbers).requires_grad_()
    z, x, keys, queries, dt, _ = torch.split(wide, [DIM, DIM, STATE, STATE, HEADS, wide.shape[-1] - PROJECTION], dim=-1)
    decay = (-torch.rand(HEADS, generator=numbers) - 0.5).requires_grad_()
    skip = torch.randn(HEADS, generator=numbers).requires_grad_()
    start = torch.randn(ROWS, HEADS, WIDTH, STATE, generator=numbers).requires_grad_()
    output, last = module.mamba_chunk_scan_combined(
        x.unflatten(-1, (HEADS, WIDTH)), dt, decay, *(each.unflatten(-1, (1, STATE)) for each in (keys, queries)), CHUNK,
        D=skip, z=z.unflatten(-1, (HEADS, WIDTH)), dt_bias=torch.zeros(HEADS), initial_states=start, dt_softplus=True,
        return_final_states=True, **more,
    )  # fmt: skip
    (output.cos().sum() + last.sin().sum()).backward()
    return [output.detach(), last.detach(), wide.grad, decay.grad, skip.grad, start.grad]


def fused(module: ModuleType, *, norm: bool) -> list[Any]:
    """Return the output and gradients of the entry that splits the projection and convolves, for two rows."""
    numbers = torch.Generator().manual_seed(2)
    leaves = [
        torch.randn(*shape, generator=numbers).requires_grad_()
        for shape in ((ROWS, TOKENS, PROJECTION), (CHANNELS, 4), (CHANNELS,), (HEADS,), (HEADS,), (DIM,), (8, DIM))
    ]
    projection, kernel, bias, dt_bias, skip, scale, out = leaves
    decay = (-torch.rand(HEADS, generator=numbers) - 0.5).requires_grad_()
    output = module.mamba_split_conv1d_scan_combined(
        projection, kernel, bias, dt_bias, decay, skip, CHUNK, headdim=WIDTH, norm_before_gate=False,
        rmsnorm_weight=scale if norm else None, outproj_weight=out,
    )  # fmt: skip
    output.cos().sum().backward()
    return [output.detach(), decay.grad, *(each.grad for each in leaves if each is not scale or norm)]


def main() -> None:
    """Answer on standard output."""
    torch.set_num_threads(1)
    module = prepare()
    records = [each for each in megacpp_overlays.audit().records if each.overlay.id == ID]
    of_a_row = TOKENS * DIM * max(STATE // CHUNK, 1)
    ways = {
        "rows of a scan": (lambda: scan(module), of_a_row + 1),
        "rows of all": (lambda: fused(module, norm=True), of_a_row + 1),
        "views": (lambda: fused(module, norm=False), ROWS * of_a_row + 1),
    }
    report: dict[str, Any] = {"decisions": [each.decision.value for each in records], "ways": {}}
    for name, (way, limit) in ways.items():
        seams.LIMIT = 2**31
        true = way()
        seams.LIMIT = limit
        with counted(module) as calls:
            found = way()
        report["ways"][name] = {
            "far": max(relative(one, other) for one, other in zip(found, true, strict=True)),
            "same output": torch.equal(found[0], true[0]),
            "rows": calls,
        }
    seams.LIMIT = 64
    try:
        scan(module)
    except RuntimeError as error:
        report["refused"] = str(error)
    sys.stdout.write(json.dumps(report))


def relative(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found - true).abs().max() / true.abs().max())


@contextlib.contextmanager
def counted(module: ModuleType) -> Iterator[list[int]]:
    """Count for how many rows the kernels of one step are launched each time."""
    original = module._state_passing_fwd
    calls: list[int] = []

    def count(states: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(states.shape[0])
        return original(states, *args, **kwargs)

    module._state_passing_fwd = count
    try:
        yield calls
    finally:
        module._state_passing_fwd = original


if __name__ == "__main__":
    main()
