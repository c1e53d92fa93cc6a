"""Offsets of Mamba-2's Triton kernels: products of 32 bits, which wrap where a tensor reaches over 2**31 elements.

A program of a kernel adds `pid_b * stride_batch + pid_c * chunk_size * stride_seqlen + ...` to its pointers. Program ids have
32 bits, and so has every stride that fits into them: larger offsets overflow to negative ones, without an error.

No tree has a repair. The kernels are in five modules, and the host code in one of them; the gated norm, which reads the same wide
projections, has one of its own. The verdict rests on all of these modules, each as a whole: the seams run every statement of them.

Source: https://github.com/state-spaces/mamba/issues/1015
"""

from __future__ import annotations

from collections.abc import Callable

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

_PACKAGE = "mamba_ssm.ops.triton"
FORWARD, BACKWARD = "_mamba_chunk_scan_combined_fwd", "_mamba_chunk_scan_combined_bwd"
NORM_FORWARD, NORM_BACKWARD = "_layer_norm_fwd", "_layer_norm_bwd"
SCAN = Target(distribution="mamba-ssm", module=f"{_PACKAGE}.ssd_combined", symbol=FORWARD)
NORM = Target(distribution="mamba-ssm", module=f"{_PACKAGE}.layernorm_gated", symbol=NORM_FORWARD)
NARROW = "products-of-32-bits"


def _probe_of(target: Target) -> Callable[[SourceTree], Finding]:
    """Return the probe of kernels that add offsets of 32 bits."""
    without = {f"{target.module}#{target.symbol}": f"defines no {target.symbol}"}
    return lambda tree: forms.finding("mamba2-int32-offsets", target, tree, without)


probe_scan, probe_norm = _probe_of(SCAN), _probe_of(NORM)
