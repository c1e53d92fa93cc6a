"""Gradients of real MoE routers from the balancing loss over the global batch, with the overlay of pack 53 and without, as JSON.

The release is the one that is first on the path, and overlays that are off by default are on. Ranks are forked from this process, which has run
no autograd before; that of pytest may have, and its copies could run none.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import megacpp_overlays

# isort: split
from megacpp_overlays.feature_probes.global_aux_loss_scale import TARGET
from megacpp_overlays.overlays.global_aux_loss_scale import OVERLAY
from megacpp_overlays.repro import beside, neighbour

FOLDER = Path(__file__).parents[2] / "packs" / "53-global-aux-loss-scale"
PACK = beside(str(FOLDER / "neighbours.py"))
KINDS: dict[str, list[str]] = {
    "both": ["aux_loss", "global_aux_loss"],
    "of a microbatch": ["aux_loss"],
    "of the batch": ["global_aux_loss"],
}
PADDED_FOR_EACH_TOKEN = {"ranks": 2, "padding": 3, "calculate_per_token_loss": True}


def main() -> None:
    """Answer on standard output."""
    warnings.simplefilter("ignore")
    PACK.prepare()
    decisions = [each.decision.value for each in megacpp_overlays.audit().records if each.overlay.id == OVERLAY.id]
    report: dict[str, Any] = {"decisions": decisions, "on": measured()}
    router = sys.modules[TARGET.module]
    report["sound"] = not OVERLAY.self_test(router).broken
    megacpp_overlays.undo()
    report["off"] = measured()
    report["seen"] = OVERLAY.witness(router).broken
    sys.stdout.write(json.dumps(report))


def measured() -> dict[str, Any]:
    """Return the results of routers with the overlays that are in now, by case."""
    return {
        "cases": [case.run().broken for case in PACK.CASES],
        "neighbours": {each.name: neighbour.measured(each).numbers for each in neighbour.load(FOLDER)},
        "two microbatches": {padding: [PACK.learnt(n, padding=padding, steps=2) for n in (2, 1)] for padding in (0, 3)},
        "padded, for each token": PACK.learnt(**PADDED_FOR_EACH_TOKEN),
        "kinds": {
            name: PACK.learnt(2, moe_router_load_balancing_type=each, moe_aux_loss_coeff=[0.5] * len(each))
            for name, each in KINDS.items()
        },
    }


if __name__ == "__main__":
    main()
