"""Probe the source from which `MambaMixer` gets the document of each token of a packed row, which may be missing.

The convolution and the scan begin anew where `seq_idx`, one number for each token, changes. Without it the conv and SSM
state of one document runs into the next.

Mixers of 0.16.0 and 0.16.1 derive it from `cu_seqlens` and the gathered length. Since 0.17.0, and on main and dev, they take
`packed_seq_params.seq_idx`, which `PackedSeqParams` fills in only where its caller gave `total_tokens`; else it is None, and nothing is
said. Up to 0.15.3 they take no packed rows.

The seam surrounds `_ssm_training` and relies on its arguments: activations of the gathered length first, and the
caller's parameters.

The verdict rests on `_ssm_training`, on `forward`, which hands over both, and on all of `PackedSeqParams`.

Source: https://github.com/NVIDIA/Megatron-LM/pull/3373 (derived in `PackedSeqParams` since).
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

_CLASS = "MambaMixer"
METHOD = f"{_CLASS}._ssm_training"
TARGET = Target(distribution="megatron-core", module="megatron.core.ssm.mamba_mixer", symbol=METHOD)
FROM_CALLER = "seq-idx-from-caller"

_ABSENT_WITHOUT = {f"{TARGET.module}:{_CLASS}": f"{TARGET.module} defines no {_CLASS}"}


def probe(tree: SourceTree) -> Finding:
    """Return whether a packed row without `total_tokens` reaches the scan without `seq_idx`."""
    return forms.finding("mamba-packed-seq-idx", TARGET, tree, _ABSENT_WITHOUT)
