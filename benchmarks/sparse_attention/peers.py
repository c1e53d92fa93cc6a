"""Attention over chosen keys as others have it for Hopper: forward passes of 576/512, bfloat16, without a backward pass.

FlashMLA comes from its repository, and so does the example of TileLang, where it is a file of
`examples/deepseek_v32`; neither is a distribution of a registry. Who is not here is not in the tables.
"""

from __future__ import annotations

import importlib
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from sparse_attention.work import Attend, Problem, Shape

FLASH_MLA, EXAMPLE = "FlashMLA", "TileLang's example"
FORWARD_ALONE = (FLASH_MLA, EXAMPLE)
"""Those that have no backward pass."""
DIMENSIONS = (576, 512)
"""Channels of keys and of values that all kernels take but ours and plain PyTorch."""
_HEADS = (64, 128)
_SLOTS = 128
"""Sizes that both take: heads, and a multiple of this many slots."""


def takes(shape: Shape) -> bool:
    """Return whether these kernels compute such a shape."""
    return (shape.dim, shape.value) == DIMENSIONS and shape.heads in _HEADS and shape.slots % _SLOTS == 0


def forward_passes(shape: Shape, example: Path | None) -> dict[str, Attend]:
    """Return who takes a shape, by name.

    Args:
        shape: of the problem.
        example: TileLang's `sparse_mla_fwd_pipelined.py`, of the release that is installed.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not takes(shape):
        return {}
    found = {FLASH_MLA: _flash_mla(), EXAMPLE: None if example is None else _tilelang(example)}
    return {name: attend for name, attend in found.items() if attend is not None}


def _flash_mla() -> Attend | None:
    try:
        compute: Any = importlib.import_module("flash_mla").flash_mla_sparse_fwd
    except (ImportError, OSError, AttributeError):
        return None

    def attend(each: Problem) -> torch.Tensor:
        query, key = each.query.detach()[:, 0], each.key.detach()[:, 0]
        output: torch.Tensor = compute(query, key, each.indices[0, :, None], each.scale, each.shape.value)[0]
        return output[:, None]

    return attend


def _tilelang(path: Path) -> Attend:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: there is no such file; it is sparse_mla_fwd_pipelined.py of TileLang's examples"
        )
    loader = SourceFileLoader(path.stem, str(path))
    module = ModuleType(loader.name)
    loader.exec_module(module)
    compute: Any = module.sparse_mla_fwd_interface

    def attend(each: Problem) -> torch.Tensor:
        query, key = each.query.detach().transpose(0, 1), each.key.detach().transpose(0, 1)
        # The first query comes after all keys, so none of them is in its future.
        first = each.key.size(0)
        output: torch.Tensor = compute(query, key, each.indices[:, :, None], first, 1, each.scale)[0]
        return output.transpose(0, 1)

    return attend
