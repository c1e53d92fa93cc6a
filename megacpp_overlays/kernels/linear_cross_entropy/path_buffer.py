"""The buffer that the dense and the compact path share (`two_paths`): allocate it, fill it, reuse its logits.

Either path's block of logits starts at the first byte. The compact path's copy of the hidden states follows its block.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megacpp_overlays.kernels.linear_cross_entropy.panel_path import PanelPath
from megacpp_overlays.kernels.linear_cross_entropy.two_paths import PathPlan, TwoPaths, row_counts_of_paths
from megacpp_overlays.kernels.masked_products.row_counts import NOTHING
from megacpp_overlays.kernels.masked_products.token_selection import Selection


def allocate(paths: TwoPaths, hidden: torch.Tensor) -> torch.Tensor:
    """Return a buffer, (bytes,), uint8, uninitialised, that has room for either path.

    Args:
        paths: the plan.
        hidden: (tokens, hidden size), which the compact path copies.
    """
    size = max(paths.block_bytes(paths.dense), paths.block_bytes(paths.compact) + hidden.nbytes)
    buffer: torch.Tensor = torch.empty(size, dtype=torch.uint8, device=hidden.device)
    return buffer


def panel_paths(paths: TwoPaths, hidden: torch.Tensor, buffer: torch.Tensor) -> tuple[PanelPath, PanelPath]:
    """Return the dense and the compact path; copy the selected hidden states into the buffer for the latter.

    Args:
        paths: the plan.
        hidden: (tokens, hidden size), contiguous.
        buffer: (bytes,), uint8, from `allocate`. The copy is written only if the compact path runs.
    """
    start = paths.block_bytes(paths.compact)
    room = buffer[start : start + hidden.nbytes].view(hidden.dtype).view(hidden.shape)
    copy = paths.selection._replace(count=paths.compact.rows).first(hidden, out=room)
    return _panel_path(paths, paths.dense, hidden, buffer), _panel_path(paths, paths.compact, copy, buffer)


def keep_logits(paths: TwoPaths) -> TwoPaths:
    """Return the plan of the backward pass that follows a forward pass: the buffer has the first group's logits."""
    return replace(
        paths,
        dense=paths.dense._replace(recomputed_rows=None),
        compact=paths.compact._replace(recomputed_rows=None),
    )


def narrow(paths: TwoPaths, selection: Selection, buffer: torch.Tensor) -> TwoPaths:
    """Return the plan of a backward pass over fewer tokens; compact the logits that the buffer has of them.

    The path that the forward pass ran, and the one that the backward pass runs, are known to the device alone:

        forward    backward    first group of the backward pass
        dense      dense       in the buffer
        dense      compact     computed again: the buffer has a dense block, and no panels
        compact    compact     moved up within the buffer

    Args:
        paths: the plan of the forward pass.
        selection: the tokens of the backward pass, a subset of those of the forward pass.
        buffer: filled by the forward pass; written in place.
    """
    dense_rows, compact_rows = row_counts_of_paths(selection)
    was_dense = paths.dense.rows >= 0
    panels = paths.compact.panels
    panels = panels._replace(planned_rows=torch.where(was_dense, compact_rows, panels.planned_rows))
    moved = selection.among(paths.selection)._replace(count=torch.where(was_dense, NOTHING, compact_rows))
    moved.bring_first(_block(paths, paths.compact, buffer), panels)
    return replace(
        paths,
        selection=selection,
        dense=PathPlan(paths.dense.panels._replace(planned_rows=dense_rows), dense_rows, None),
        compact=PathPlan(panels, compact_rows, torch.where(was_dense, compact_rows, NOTHING)),
    )


def _panel_path(paths: TwoPaths, plan: PathPlan, hidden: torch.Tensor, buffer: torch.Tensor) -> PanelPath:
    return PanelPath(
        hidden=hidden,
        order=None,
        selection=paths.selection._replace(count=plan.rows),
        panels=plan.panels,
        block=_block(paths, plan, buffer),
        recomputed_rows=plan.recomputed_rows,
    )


def _block(paths: TwoPaths, plan: PathPlan, buffer: torch.Tensor) -> torch.Tensor:
    """Return the part of the buffer for a path's logits, (tokens, panel width and padding)."""
    return buffer[: paths.block_bytes(plan)].view(paths.dtype).view(plan.panels.rows, -1)
