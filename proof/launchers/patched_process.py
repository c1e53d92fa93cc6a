"""One process in which another library replaces functions of upstreams, before overlays are installed or after.

    patched_process.py LIBRARY ORDER MODULE...

ORDER is `before` (the library's patches are applied, then this package is imported), `after` (the other way round) or `alone`
(no patch at all). The modules are imported first; they are the targets of overlays. One line of JSON says which names were
replaced, and every decision before and after.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import replaced_names
from engine_python_half import without_compiled_half
from patched_libraries import AFTER, ALONE, LIBRARIES, SUBCLASSED, UPSTREAMS


def applied(library: str) -> dict[str, Any]:
    """Apply the patches of a library; return which names each replaced, and which classes derive from upstream ones."""
    package, patches = LIBRARIES[library]
    steps = []
    before = replaced_names.take(UPSTREAMS)
    for step in patches():
        after = replaced_names.take(UPSTREAMS)
        found = replaced_names.replaced(before, after, package)
        steps.append({"step": step, "replaced": [each._asdict() for each in found]})
        before.clear()
        before = after
    before.clear()  # a library may keep the frames that were active while it was imported, and the objects in them
    derived = replaced_names.overriding(SUBCLASSED, package)
    return {"steps": steps, "derived": [each._asdict() for each in derived]}


def decisions() -> list[dict[str, Any]]:
    """Return the entries of an audit for every part of every overlay."""
    import megacpp_overlays

    return [
        {
            "id": record.overlay.id,
            "module": record.overlay.target.module,
            "verdict": record.verdict,
            "decision": record.decision.value,
            "reason": record.reason,
            "around": list(record.around),
        }
        for record in megacpp_overlays.audit().records
    ]


def import_targets(modules: list[str]) -> None:
    """Import the modules that are installed."""
    for module in modules:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)


def main(library: str, order: str, modules: list[str]) -> dict[str, Any]:
    """Apply the patches in the order that is asked for; return all that was seen."""
    without_compiled_half()
    if order == AFTER:
        importlib.import_module("megacpp_overlays")
    import_targets(modules)
    if order == ALONE:
        return {"decisions": decisions()}
    stock = decisions() if order == AFTER else None
    return {"stock": stock, **applied(library), "decisions": decisions()}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    seen = main(sys.argv[1], sys.argv[2], sys.argv[3:])
    print("\n" + json.dumps(seen), flush=True)
