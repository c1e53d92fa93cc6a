"""Probe the MIMO backward functions of Mamba-3 for the numbers of groups into which they sum the gradients of heads.

With G groups for H heads the kernels read group `head // (H // G)` and write gradients for each head. The host then
sums them. In mamba-ssm 2.3.2.post1 it supports G = 1 and G = H and raises for 1 < G < H; on main one reducer takes
every G that divides H since 2026-06-08.

The verdict rests on the two modules as a whole, kernels, helpers and host, for the seam runs upstream's whole function; a
repair also on the module of its reducer.

Source: https://github.com/state-spaces/mamba/pull/967
"""

from __future__ import annotations

from collections.abc import Callable

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

_PACKAGE = "mamba_ssm.ops.tilelang.mamba3"
PLAIN = Target("mamba-ssm", f"{_PACKAGE}.mamba3_mimo_bwd", "mamba_mimo_bwd_combined")
VARLEN = Target("mamba-ssm", f"{_PACKAGE}.mamba3_mimo_bwd_varlen", "mamba_mimo_bwd_combined_varlen")

ONE_OR_ALL = "one-or-all-groups"


def _probe_of(target: Target) -> Callable[[SourceTree], Finding]:
    """Return the probe of a backward pass with 1 < G < H."""
    return lambda tree: forms.finding("mamba3-mimo-gqa-backward", target, tree)


probe_plain, probe_varlen = _probe_of(PLAIN), _probe_of(VARLEN)
