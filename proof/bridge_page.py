"""The section of a proof's page about megatron-bridge's pretrain function."""

from __future__ import annotations

from claims import Found
from megatron_launches import Layout
from megatron_page import decisions, losses


def launches(found: Found) -> list[str]:
    """Return the lines of the section."""
    return [
        "## The pretrain function of megatron-bridge",
        "",
        "`proof/launchers/bridge_pretrain.py` makes a `ConfigContainer` of a small hybrid model and mock data, and calls",
        "`megatron.bridge.training.pretrain.pretrain` as the wheel has it. It is launched by `torchrun`, and by",
        "`megacpp-overlays run --verify-ranks` in front of that. Layers: DeepSeek sparse attention over absorbed latent attention, an MLP,",
        f"experts, in Megatron's local modules (`proof/launchers/local_stack.py`). {found['steps']} steps, bfloat16.",
        "",
        "Differences from a run on a GPU:",
        "",
        "- `proof/on_cpu` answers for CUDA, and nothing in it computes; kernels of overlays are PyTorch in blocks.",
        "- There is no Mamba layer: its kernels are Triton's, for a GPU.",
        "- There is no Transformer Engine and no nvidia-resiliency-ext. megatron-bridge annotates with one class of each, and",
        "  `proof/launchers/bridge_stand_ins.py` has the names while the two modules that ask are executed.",
        "- megatron-bridge runs `make` among Megatron's data sets, and ends where that does. Megatron's wheel has the files that it would make and no Makefile,",
        "  on any host, so `MAKEFLAGS` gives `make` a target of which nothing is to be made.",
        *(line for layout in Layout for line in losses(found, layout)),
        "",
        "Decisions where overlays are on:",
        "",
        *decisions(found),
    ]
