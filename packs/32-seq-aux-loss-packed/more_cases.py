"""The case of `reproduce.py`, where the process that forks ranks has loaded all three modules that are repaired together."""

from __future__ import annotations

import importlib

from megacpp_overlays.repro import Behaviour, Case, beside

PACK = beside(__file__)
EXPERTS = "megatron.core.transformer.moe.moe_layer"


def _all_parts() -> Behaviour:
    importlib.import_module(EXPERTS)
    found: Behaviour = PACK._sequence_parallel()
    return found


CASES = (
    Case(
        name="experts-cpu",
        overlay="seq-aux-loss-packed",
        device="cpu",
        versions=("torch",),
        run=_all_parts,
        targets=(PACK.LAYER, PACK.ROUTER, EXPERTS),
    ),
)
