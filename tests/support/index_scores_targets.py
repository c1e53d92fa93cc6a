"""Run in a fresh interpreter: compile the kernels of pack 12 for devices that this host need not have; print JSON.

Another device is made current for Triton, and a launch ends once its program is compiled: tiles, stages and the known properties
of the arguments are those of a real call. Triton's cache keeps the programs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch

QUERIES, KEYS, BATCH, HEADS = (128, 512), 256, 1, 48
"""Multiples of 16, so that copies are asynchronous and pipelines as deep as they get.

Few queries and many, which have two tiles a program; and so many heads that some scores are added to others.
"""


class Device:
    """All that Triton asks a driver for when it compiles."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)


def obstacle() -> str | None:
    """Return why nothing can be compiled here, if so."""
    import triton
    from triton.backends import backends

    if "nvidia" not in backends:
        return f"triton {triton.__version__} on {sys.platform} has no NVIDIA backend"
    try:
        _ = triton.knobs.nvidia.ptxas
    except RuntimeError as error:
        return f"triton {triton.__version__}: {error}"
    return None


def order_of(compiled: Any) -> dict[str, int]:
    """Return whether a program begins while the one ahead ends, and where it lets the next one in, waits, and touches memory.

    Places are -1 for steps that the program does not have.
    """
    ptx = compiled.asm["ptx"]
    access = re.search(r"\b(ld|st|atom|red)\.global|cp\.async", ptx)
    return {
        "begins early": compiled.metadata.launch_pdl,
        "lets the next begin": ptx.find("griddepcontrol.launch_dependents"),
        "waits": ptx.find("griddepcontrol.wait"),
        "first access": access.start() if access else -1,
    }


def machine_code_of(compiled: Any) -> dict[str, int]:
    """Return the spilled bytes of a thread, and how many products the matrix unit starts and how often the program waits for them."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    stack = re.search(r"STACK:(\d+)", said.stdout + said.stderr)
    assert stack is not None, said
    products, waits = (len(re.findall(rf"\b{each}\b", said.stdout)) for each in ("HGMMA", r"WARPGROUP\.DEPBAR"))
    return {"stack": int(stack[1]), "products": products, "waits for products": waits}


def collect(*, machine_code: bool = False) -> list[dict[str, Any]]:
    """Compile launches without running them from now on; return the list to which the needs of each one are appended.

    Args:
        machine_code: whether to add the findings of `machine_code_of`, which takes a process for each.
    """
    from triton.runtime.jit import JITFunction

    needs: list[dict[str, Any]] = []
    run = JITFunction.run

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = run(function, *args, grid=grid, warmup=True, **options)
        metadata = compiled.metadata
        tensor_memory = getattr(metadata, "tmem_size", None) or 0  # before capability 10 there is none
        found = {"kernel": function.__name__, "program": metadata.hash, **order_of(compiled)}
        found |= {"shared": metadata.shared, "tensor_memory": tensor_memory, "registers": metadata.maxnreg}
        if machine_code:
            found |= machine_code_of(compiled)
        needs.append(found)

    JITFunction.run = compile_only
    return needs


def compile_for(architecture: int, dim: int) -> None:
    from triton.runtime import driver

    from megacpp_overlays.kernels.index_scores import in_triton as index_scores_triton

    driver.set_active(Device(architecture))
    for queries in QUERIES:
        q = torch.zeros(queries, BATCH, HEADS, dim, dtype=torch.bfloat16)
        weights, k = torch.zeros(queries, BATCH, HEADS), torch.zeros(KEYS, BATCH, dim, dtype=torch.bfloat16)
        index_scores_triton.scores(q, weights, k, True)
        index_scores_triton.gradients(torch.zeros(BATCH, queries, KEYS), q, weights, k, True)


def answer(compile_for: Callable[..., None], *, machine_code: bool = False) -> None:
    """Print the needs of the kernels of each case on the command line, by the function that compiles one of its numbers.

    Args:
        machine_code: as of `collect`.
    """
    if reason := obstacle():
        sys.stdout.write(json.dumps({"obstacle": reason}))
        return
    found = {}
    needs = collect(machine_code=machine_code)
    for case in sys.argv[1:]:
        compile_for(*[int(part) for part in case.split(":")])
        found[case] = list(needs)
        needs.clear()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    answer(compile_for)
