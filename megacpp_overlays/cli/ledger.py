"""`megacpp-overlays ledger`: print, check or rewrite RETIREMENT.md from the declarations, or list the overlays that are due."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megacpp_overlays import files
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add
from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.loader import session
from megacpp_overlays.source.trees import InstalledTree
from megacpp_overlays.upkeep.ledger import difference, due, render

_TEXT = "Print RETIREMENT.md as the declarations have it, check or rewrite the file, or list the overlays that are due."
_EXAMPLES = ("ledger --due", "ledger --check RETIREMENT.md", "ledger --write RETIREMENT.md")
_CODES = {
    ExitCode.CLEAN: "printed or written; with --check in step; with --due nothing can be deleted here",
    ExitCode.FOUND: "with --check out of step; with --due something can be deleted here",
    ExitCode.NOT_CHECKED: "FILE cannot be read or written",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "ledger", _TEXT, examples=_EXAMPLES, codes=_CODES)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", metavar="FILE", type=Path, help="exit 1 when FILE is not in step")
    action.add_argument("--due", action="store_true", help="list overlays to delete here; exit 1 when there is any")
    action.add_argument("--write", metavar="FILE", type=Path, help="bring FILE in step, its history kept")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> bool:
    """Run the command; return whether the ledger is in step and nothing is due."""
    overlays = session.current().overlays
    if arguments.check is not None:
        if not arguments.check.is_file():
            raise UpkeepError(f"{arguments.check} is not there; `megacpp-overlays ledger --write FILE` makes one")
        found = difference(overlays, arguments.check)
        print(found or f"{arguments.check} is in step", file=sys.stderr if found else sys.stdout)
        return not found
    if arguments.due:
        overdue = due(overlays, InstalledTree(), session.current().settings)
        print("\n".join(f"{overlay.id}: {overlay.retire_when}" for overlay in overdue) or "nothing is due here")
        return not overdue
    if arguments.write is not None:
        files.write_text(arguments.write, render(overlays, arguments.write))
    else:
        print(render(overlays, None))
    return True
