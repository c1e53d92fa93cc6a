"""`megacpp-overlays receipts`: check the inventory and its receipts, adopt receipts, or bring the manifest in step."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megacpp_overlays import files
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add
from megacpp_overlays.loader import session
from megacpp_overlays.model import Erratum
from megacpp_overlays.repro import inventory, manifest, receipts

_TEXT = "Check the packs and their receipts, take in receipts from another machine, or bring the manifest in step."
_MORE = "--check shows that logs and manifest are consistent, not that a log is authentic: nothing is signed."
_EXAMPLES = ("receipts --check", "receipts --adopt fetched/packs", "receipts --sync")
_CODES = {
    ExitCode.CLEAN: "every claim has a log that is as it was kept; with --adopt or --sync, it was done",
    ExitCode.FOUND: "a claim has no kept log, a log was changed, or the manifest is not in step",
    ExitCode.NOT_CHECKED: "a folder has no manifest, or one that cannot be read",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "receipts", _TEXT, more=_MORE, examples=_EXAMPLES, codes=_CODES)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument(
        "--check", action="store_true", help="exit 1 when a claim has no kept log, or a log was changed"
    )
    action.add_argument(
        "--adopt", metavar="FOLDER", type=Path, help="take in receipts of `repro --keep FOLDER` from another machine"
    )
    action.add_argument("--sync", action="store_true", help="bring the manifest in step with notes and declarations")
    parser.add_argument("--packs", metavar="FOLDER", type=Path, help="where the packs are, if not in the package")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> bool:
    """Run the command; return whether every claim and receipt holds."""
    folder = arguments.packs or inventory.own_folder()
    overlays = _overlays()
    if arguments.sync:
        with files.locked(folder):
            manifest.write(folder, manifest.synchronise(folder, overlays))
    elif arguments.adopt is not None:
        for log in receipts.adopt(arguments.adopt, folder):
            print(f"adopted: {log}")
    wrong = [*manifest.problems(folder, overlays), *receipts.problems(folder)]
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        total, fresh = receipts.current_of(folder, manifest.read(folder)["packs"])
        print(f"{total} receipts hold; {fresh} of them are of the reproducers as they are now")
    return not wrong


def _overlays() -> tuple[Erratum, ...]:
    return session.current().overlays
