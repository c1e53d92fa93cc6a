"""A run of a pack's reproducer now, on this host: a receipt of another day does not say so.

What is asked depends on the class: the defect and its repair where there is a repair, the defect alone in a bug report,
and its absence in a regression guard.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megacpp_overlays.errors import OverlayError
from megacpp_overlays.model import Erratum
from megacpp_overlays.repro import inventory, manifest, receipts, runner
from megacpp_overlays.repro.inventory import Pack
from megacpp_overlays.repro.judge import Sentinel, meaning
from megacpp_overlays.repro.transcript import Transcript
from megacpp_overlays.repro.trees import STAND_IN
from megacpp_overlays.upkeep.filing.checks import Check, CheckOutcome

NAME = "reproducer"

_REPAIR = frozenset({Sentinel.BUG_REPRODUCED, Sentinel.FIX_VALIDATED})
_CLAIM = frozenset({Sentinel.CLAIM_HOLDS})
"""What a pack that is held may show instead: the reason why there is nothing to repair."""
_WANTED: Mapping[str, frozenset[Sentinel]] = {
    "overlay": _REPAIR,
    "fork": _REPAIR,
    "held": _REPAIR,
    "gate": frozenset({Sentinel.BUG_REPRODUCED}),
    "bug report": frozenset({Sentinel.BUG_REPRODUCED}),
    "regression guard": frozenset({Sentinel.BUG_NOT_PRESENT}),
}


def check(
    pack: Pack,
    kind: str,
    overlays: Sequence[Erratum],
    *,
    tree: Path | None = None,
    timeout: float = 900.0,
    show: Callable[[str], None] = lambda _: None,
) -> Check:
    """Run every case of a pack now.

    Args:
        pack: the pack.
        kind: its class.
        overlays: every declared overlay, in parts.
        tree: a folder with the packages to run against, or None for what is installed.
        timeout: seconds for one process of a case.
        show: prints a line of the run while it goes on.
    """
    if not pack.reproducer.is_file():
        return Check(name=NAME, outcome=CheckOutcome.FAILED, reason="there is no reproduce.py yet")
    try:
        receipt = _run(pack, overlays, tree, timeout, show)
    except OverlayError as error:
        return Check(name=NAME, outcome=CheckOutcome.FAILED, reason=f"it cannot run: {error}")
    wrong = _wrong_with(receipt, _WANTED[kind])
    if wrong and kind == "held":
        wrong = _wrong_with(receipt, _CLAIM)
    earned = ", ".join(f"{claim['sentinel']} ({claim['case']})" for claim in receipt["claims"])
    return Check(
        name=NAME,
        outcome=CheckOutcome.FAILED if wrong else CheckOutcome.PASSED,
        reason=wrong or f"on {receipt['date']}, exit code 0: {earned}",
        details=(receipt["stamp"],),
    )


def _run(
    pack: Pack, overlays: Sequence[Erratum], tree: Path | None, timeout: float, show: Callable[[str], None]
) -> dict[str, Any]:
    """Run the pack as `megacpp-overlays repro` does; return the receipt, and the stamp as a line."""
    command = ["megacpp-overlays", "repro", str(pack.number), *(["--tree", "PATH"] if tree else [])]
    job = runner.Job(
        reproducer=pack.reproducer,
        cases=inventory.load_cases(pack.reproducer),
        overlays=tuple(overlays),
        command=shlex.join(command),
        tree=tree,
        timeout=timeout,
    )
    transcript = Transcript([tree.resolve()] if tree else [], show)
    with tempfile.TemporaryDirectory(prefix="receipt-") as folder:
        entry = receipts.prepare(Path(folder), pack, overlays)
        stamp, _ = runner.run(job, transcript)
        receipts.keep(Path(folder), entry, pack, stamp, transcript.text, job.command)
        kept = manifest.entry_of(manifest.read(Path(folder)), pack.number)
    return {**(kept or {})["receipts"][-1], "stamp": stamp.line()}


def _wrong_with(receipt: Mapping[str, Any], wanted: frozenset[Sentinel]) -> str | None:
    """Return why a run does not show what is wanted, of one overlay at least, or None."""
    if receipt["exit_code"] == runner.NOTHING_RAN:
        return "nothing ran: every case is BLOCKED on this host"
    if receipt["exit_code"]:
        return f"exit code {receipt['exit_code']}: a case failed"
    if STAND_IN in (receipt["tree"] or {}):
        return "the tree is a stand-in and says nothing of upstream"
    shown: dict[str, set[Sentinel]] = {}
    for claim in receipt["claims"]:
        shown.setdefault(claim["overlay"], set()).add(meaning(claim["sentinel"]))
    if any(wanted <= found for found in shown.values()):
        return None
    seen = ", ".join(sorted({sentinel.value for found in shown.values() for sentinel in found}))
    return f"{' and '.join(sorted(each.value for each in wanted))} not shown here; {seen} was"
