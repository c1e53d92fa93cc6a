"""Run in a fresh interpreter: the results of a real MambaMixer for packed rows, as JSON.

    TRITON_INTERPRET=1 python tests/support/packed_mixer_facts.py

The release is the one that is first on the path; MEGACPP_OVERLAY_MAMBA_PACKED_SEQ_IDX=off leaves it as it is.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import megacpp_overlays

# isort: split
import packed_mixer
import torch
from packed_mixer import PACKINGS, Pass, alone, apart, make, prepare, run, same_bits, scans, weights_of


def bits(found: Pass) -> str:
    """Return a hash of every result of a pass."""
    digest = hashlib.sha256()
    for each in (found.output, found.slope, *(found.slopes[name] for name in sorted(found.slopes))):
        digest.update(each.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    """Answer on standard output; the words that follow are the packings, all of them if there are none."""
    torch.set_num_threads(1)
    module = prepare()
    mixer = make(module)
    chosen = {name: packing for name, packing in PACKINGS.items() if name in (sys.argv[1:] or PACKINGS)}
    takes_total = "total_tokens" in module.PackedSeqParams.__dataclass_fields__
    report: dict[str, Any] = {"device": packed_mixer.DEVICE, "packings": {}}
    for name, packing in chosen.items():
        row, weights, params = packing.row(), weights_of(packing), packing.params(module)
        with scans(module) as seen:
            found = run(mixer, row, weights, params)
        facts: dict[str, Any] = {
            "apart": apart(found, alone(mixer, packing), packing),
            "seq_idx": None if seen[0] is None else seen[0].tolist(),
            "dtype": None if seen[0] is None else str(seen[0].dtype),
            "field of the caller": getattr(params, "seq_idx", None),
        }
        if takes_total:
            counted = run(mixer, row, weights, packing.params(module, total_tokens=packing.tokens))
            facts |= {"explicit": bits(counted), "as explicit": same_bits(found, counted)}
        report["packings"][name] = facts
    report["not packed"] = bits(run(mixer, row, weights))
    if packed_mixer.CUDA:
        report["variants"] = {
            name: _variant(module, PACKINGS["within chunks"], **options)
            for name, options in {"no norm": {"rmsnorm": False}, "D for each channel": {"D_has_hdim": True}}.items()
        }
    records = {each.overlay.id: each for each in megacpp_overlays.audit().records}
    record = records["mamba-packed-seq-idx"]
    report |= {"decision": record.decision.value, "reason": record.reason}
    sys.stdout.write(json.dumps(report))


def _variant(module: Any, packing: Any, **options: Any) -> dict[str, float]:
    mixer = make(module, **options)
    found = run(mixer, packing.row(), weights_of(packing), packing.params(module))
    return apart(found, alone(mixer, packing), packing)


if __name__ == "__main__":
    main()
