"""Run in a fresh interpreter: observations of the cases of a pack for a CPU, with every overlay and with none; JSON.

    python tests/support/reproduced.py PACK [neighbours]

The release is the one that is first on the path. Asked for neighbours, it also lists the neighbours that were measured without overlays,
and the differences of each that is not the same with them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import megacpp_overlays

# isort: split
from megacpp_overlays.repro import Blocked, Case, TargetAbsent, inventory, neighbour
from megacpp_overlays.repro.case import CPU

PACKS = Path(__file__).parents[2] / "packs"


def seen(case: Case) -> dict[str, Any]:
    """Return the observations of a case, the missing requirement, or why this release cannot run it."""
    try:
        return dataclasses.asdict(case.run())
    except Blocked as error:
        return {"blocked": str(error)}
    except TargetAbsent as error:
        return {"absent": str(error)}


def compared(
    neighbours: Sequence[neighbour.Neighbour], ours: Sequence[neighbour.NeighbourResult]
) -> dict[str, list[str]]:
    """Return the neighbours that were measured without overlays, those that this release does not have, and all problems."""
    stock = [neighbour.measured(each) for each in neighbours]
    problems = map(neighbour.problem, neighbours, stock, ours)
    return {
        "measured": [each.name for each, found in zip(neighbours, stock, strict=True) if found.numbers is not None],
        "absent": [each.name for each, found in zip(neighbours, stock, strict=True) if found.numbers is None],
        "problems": [each for each in problems if each is not None],
    }


def main() -> None:
    """Answer on standard output."""
    (path,) = PACKS.glob(f"{sys.argv[1]}*/reproduce.py")
    cases = [case for case in inventory.load_cases(path) if case.device == CPU]
    report: dict[str, Any] = {"on": {case.name: seen(case) for case in cases}}
    ids = {case.overlay for case in cases}
    neighbours = [each for each in neighbour.load(path.parent) if each.overlay in ids and "neighbours" in sys.argv]
    ours = [neighbour.measured(each) for each in neighbours]
    records = [each for each in megacpp_overlays.audit().records if each.overlay.id in ids]
    report["decisions"] = [[each.overlay.id, each.decision.value, each.reason] for each in records]
    megacpp_overlays.undo()
    report["off"] = {case.name: seen(case) for case in cases}
    report["neighbours"] = compared(neighbours, ours)
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
