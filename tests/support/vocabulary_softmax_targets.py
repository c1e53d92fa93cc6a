"""Run in a fresh interpreter: compile the passes of `vocabulary_softmax` for devices that this host need not have.

Prints as JSON the needs of each program, by the architecture that the command line names.
"""

from __future__ import annotations

import json
import sys
from itertools import product

import torch
from index_scores_targets import Device, collect, obstacle
from vocabulary_softmax_cases import Case, draw, run

CASES = [
    Case(tokens=2, widths=(256, 256), logits="bfloat16", out="bfloat16"),
    Case(tokens=2, widths=(33024,), logits="bfloat16", out="bfloat16"),
    Case(tokens=2, widths=(4097,), logits="float16", out="float16", labels="int32"),
    Case(tokens=2, widths=(9001,), out="bfloat16"),
    Case(tokens=2, widths=(256, 33024), logits="bfloat16", out="bfloat16", selected=(1,)),
    Case(
        tokens=2,
        widths=(4096, 1007),
        out="bfloat16",
        selected=(1,),
        bias=True,
        class_weight=True,
        spread=True,
        softcap=2.0,
    ),
    *(
        Case(
            tokens=2, widths=(4096, 1007), logits=dtype, out=out, bias=True, class_weight=True, spread=True, softcap=2.0
        )
        for dtype, out in (("bfloat16", "bfloat16"), ("float32", "float32"), ("float32", "bfloat16"))
    ),
]


def compile_all() -> None:
    """Make every launch once; none is carried out."""
    from megacpp_overlays.kernels.vocabulary_softmax import in_triton as passes

    for case in CASES:
        run(case, draw(case), passes)
    numbers = torch.zeros(64)
    for labels, gradient in product((torch.int64, torch.int32), (torch.float32, torch.bfloat16)):
        known = torch.zeros(64, dtype=labels)
        passes.plain_losses((numbers, numbers, numbers, None), known, -100)
        passes.plain_coefficients((numbers, numbers, numbers, None), known, -100, numbers.to(gradient))


def main() -> None:
    """Answer for each architecture on the command line."""
    if reason := obstacle():
        sys.stdout.write(json.dumps({"obstacle": reason}))
        return
    from triton.runtime import driver

    from megacpp_overlays.kernels.masked_products import launches

    found = {}
    needs = collect(machine_code=True)
    for architecture in sys.argv[1:]:
        driver.set_active(Device(int(architecture)))
        launches.begins_early = lambda _, early=int(architecture) >= 90: early
        compile_all()
        found[architecture] = list(needs)
        needs.clear()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
