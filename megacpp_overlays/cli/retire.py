"""`megacpp-overlays retire ID`: the checklist and the history entry of an overlay that upstream no longer needs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add
from megacpp_overlays.loader import retired, session
from megacpp_overlays.repro import ending
from megacpp_overlays.upkeep.retire import preparation, steps
from megacpp_overlays.upkeep.retire.preparation import Request, RetirementOutcome, WrongNameError
from megacpp_overlays.upkeep.retire.retirement import ChecklistItem

_TEXT = (
    "Retire an overlay: prove that upstream is right without it, write its entry in the history, and list the files to "
    "remove and the lines to edit."
)
_MORE = """\
It runs in a git checkout of this package. It writes megacpp_overlays/loader/retired.json and keeps the receipt of the
run that shows the bug gone; files are removed and edited by a person, with the commands and lines that it prints.
"""
_EXAMPLES = ("retire liger-flce-none-backward --lock locks/newest.txt --dry-run",)
_CODES = {
    ExitCode.CLEAN: "the checklist holds: it was written, or with --dry-run it could be",
    ExitCode.FOUND: "refused; the checklist says why",
    ExitCode.NOT_CHECKED: "a lock or an environment cannot be used, or this is no checkout of this package",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "retire", _TEXT, more=_MORE, examples=_EXAMPLES, codes=_CODES)
    parser.add_argument("overlay", metavar="ID", help="the overlay")
    parser.add_argument(
        "--lock", metavar="LOCK", type=Path, required=True, help="the pinned lock for which all of it is shown"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--python", metavar="PATH", type=Path, help="interpreter of an environment that holds the lock")
    where.add_argument("--environments", metavar="FOLDER", type=Path, help="environments by lane (default: .envs)")
    parser.add_argument(
        "--leave", metavar="LANE", action="append", default=[], help="let this lane run unpatched; can be repeated"
    )
    parser.add_argument(
        "--since",
        metavar="VERSION",
        help="first release with the repair, as the matrix has it (default: the pinned one)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the entry and the steps, and write nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the checklist")
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Prepare the retirement, print it, and return whether the overlay may go."""
    request = Request(
        overlay=arguments.overlay,
        lock=arguments.lock,
        python=arguments.python,
        environments=arguments.environments,
        leave=tuple(arguments.leave),
        since=arguments.since,
        dry_run=arguments.dry_run,
    )
    try:
        with ending.by_exception():
            outcome = preparation.prepare(
                request, session.current().overlays, _ignore if arguments.json else _show, _tell
            )
    except WrongNameError as error:
        parser.error(str(error))
    if arguments.json:
        print(json.dumps(_as_dict(outcome), indent=2))
    else:
        print(f"\n{_report(outcome)}")
    return outcome.holds


def _show(item: ChecklistItem) -> None:
    print(f"{item.state.value:<11}  {item.name:<16}  {steps.shortened(item.said)}", flush=True)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _ignore(_: ChecklistItem) -> None:
    return


def _report(outcome: RetirementOutcome) -> str:
    if not outcome.holds:
        options = " ".join(item.way_out for item in outcome.items if item.way_out)
        unpatched = f" To let these lanes run unpatched: {options}" if options else ""
        return f"{outcome.entry.id} stays, and nothing was changed.{unpatched}"
    if not outcome.written:
        entry = retired.to_json([outcome.entry])
        return (
            f"Entry of the history:\n{entry}\n{steps.steps(outcome)}\n\nNothing was written. Without --dry-run it is."
        )
    return "\n".join(["Written:", *(f"  {path}" for path in outcome.written), "", steps.steps(outcome)])


def _as_dict(outcome: RetirementOutcome) -> dict[str, object]:
    left = outcome.leavings
    return {
        "overlay": outcome.entry.id,
        "prepared": outcome.holds,
        "checklist": [
            {"item": item.name, "state": item.state.value, "said": item.said, "way_out": item.way_out}
            for item in outcome.items
        ],
        "entry": json.loads(retired.to_json([outcome.entry]))[0],
        "written": list(outcome.written),
        "remove": list(left.files),
        "unused": list(left.unused),
        "mentions": list(left.mentions),
        "message": list(steps.message(outcome)),
    }
