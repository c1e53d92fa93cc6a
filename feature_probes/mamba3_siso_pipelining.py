"""The tuner of the Mamba-3 SISO forward kernel, and how many stages it may choose on Blackwell.

On compute capability 10 and 12, more than one stage of software pipelining corrupts the output of this recurrent kernel
without an error (state-spaces/mamba#997, seen there with Triton 3.5.1 to 3.7.0). 2.3.2.post1 lets the tuner choose
among one, two and three; main drops all but one on those devices since 2026-07-23.

The verdict rests on the kernel with its decorators, which are the configurations; a repair on the whole module.
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TARGET = Target("mamba-ssm", "mamba_ssm.ops.triton.mamba3.mamba3_siso_fwd", "mamba3_siso_fwd_kernel")
ANY_STAGES = "any-number-of-stages"

_ABSENT_WITHOUT = {f"{TARGET.module}#{TARGET.symbol}": f"defines no {TARGET.symbol}"}


def probe(tree: SourceTree) -> Finding:
    """Return whether the tuner is kept from more than one stage."""
    return forms.finding("mamba3-siso-pipelining", TARGET, tree, _ABSENT_WITHOUT)
