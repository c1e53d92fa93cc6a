"""Load a kernel of the Hugging Face Hub from a folder, as `use_kernels=True` loads it from the Hub, and take a step.

    python proof/launchers/hub_kernel.py FOLDER

Nothing in it knows of overlays.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from kernels import get_local_kernel


def main(folder: str) -> None:
    """Load the kernel, and take a step of an optimizer, which is where a run begins."""
    kernel = get_local_kernel(Path(folder), backend="cpu", trust_remote_code=True)
    print(kernel.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction.__name__)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    weight.sum().backward()
    optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1])
