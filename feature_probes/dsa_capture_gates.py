"""Validations of DSA that read device values from the host on the way of a captured forward pass.

In `dsa_layout` position ids are compared with `torch.equal`, on CUDA too, and in `dsa_masking` masks and key positions: a mask that fails is no
error, it declines the fused indexer. In `dsa` the context-parallel length check reads the gathered lengths; the single file of spring 2026 had all three.

While a stream is captured the seams replace upstream's checks: masks from its builder count as contiguous, and its bounds are
computed without its comparisons. The verdict rests on the checks and on every helper that makes or reads a mask or a position.
No tree is on record that has the single file.

Source: https://github.com/NVIDIA/Megatron-LM/pull/5099
"""

from __future__ import annotations

from collections.abc import Callable

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

POSITIONS = "extract_query_positions_from_position_ids"
BOUNDS = "build_fused_indexer_varlen_bounds"
MASK = "build_dsattention_forward_mask"
LENGTHS = "_validate_nonpacked_cp_uniform_length"

_ID = "dsa-capture-gates"
_VARIANT = "megatron.core.transformer.experimental_attention_variant"
LAYOUT_TARGET = Target(distribution="megatron-core", module=f"{_VARIANT}.dsa_layout", symbol=POSITIONS)
MASKING_TARGET = Target(distribution="megatron-core", module=f"{_VARIANT}.dsa_masking", symbol=BOUNDS)
DSA_TARGET = Target(distribution="megatron-core", module=f"{_VARIANT}.dsa", symbol=LENGTHS)

EQUAL_POSITIONS = "positions-compared-on-host"
EQUAL_BOUNDS = "masks-compared-on-host"
READ_LENGTHS = "lengths-read-on-host"
SINGLE = "single-file"
SINGLE_FUSED = "single-file-with-fused-indexer"


def _probe_of(target: Target, *needed: str) -> Callable[[SourceTree], Finding]:
    """Return the probe of one module's reads from the host: position ids, masks with key positions, or lengths of context-parallel ranks."""
    without = {f"{target.module}:{name}": f"defines no {name}" for name in needed}
    return lambda tree: forms.finding(_ID, target, tree, without)


probe_layout, probe_masking = _probe_of(LAYOUT_TARGET, POSITIONS), _probe_of(MASKING_TARGET, BOUNDS)
probe_dsa = _probe_of(DSA_TARGET)
