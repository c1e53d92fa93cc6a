"""`megacpp-overlays pack list`: list every pack, its upstream state, and the next step."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add
from megacpp_overlays.loader import session
from megacpp_overlays.loader.rendering import aligned
from megacpp_overlays.repro import inventory
from megacpp_overlays.upkeep import pack_status
from megacpp_overlays.upkeep.pack_status import PackStatus

_TEXT = "List every pack: its class, where it would be filed, and the next step. Nothing is ever sent."
_EXAMPLES = ("pack list", "pack list --json")
_CODES = {
    ExitCode.CLEAN: "listed",
    ExitCode.NOT_CHECKED: "the manifest, a saved answer or the notes of a pack cannot be read",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "pack", _TEXT, examples=_EXAMPLES, codes=_CODES)
    actions = parser.add_subparsers(metavar="action", required=True)
    every = actions.add_parser("list", help=_TEXT, description=_TEXT)
    every.add_argument("--packs", metavar="FOLDER", type=Path, help="where the packs are, if not in the package")
    every.add_argument("--json", action="store_true", help="for machines")
    every.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> bool:
    """Print the status of every pack."""
    packs = pack_status.of_all(arguments.packs or inventory.own_folder(), session.current().overlays)
    if arguments.json:
        print(json.dumps([_as_data(each) for each in packs], indent=2))
        return True
    head = ("pack", "class", "state", "repository", "upstream", "priority", "receipts", "threads")
    first, rule, *lines = aligned(head, [_row(each) for each in packs])
    print(first)
    print(rule)
    for each, line in zip(packs, lines, strict=True):
        print(line)
        print(f"      {each.entry['title']}")
        print(f"      next: {each.next_step}")
    print("\nreceipts: all, and those of the reproducer as it is now")
    return True


def _row(pack: PackStatus) -> tuple[str, ...]:
    entry = pack.entry
    kept, now = pack.kept
    receipts = f"{kept}, {now} now" if pack.has_reproducer else "no reproducer"
    named = [entry["repository"] or "-", entry["upstream"] or "-", entry["priority"] or "-"]
    states = Counter(each.state for each in pack.threads)
    threads = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return (f"{pack.pack.number:02}", entry["class"], entry["state"], *named, receipts, threads or "-")


def _as_data(pack: PackStatus) -> dict[str, object]:
    names = ("number", "title", "class", "state", "repository", "upstream", "priority", "overlays")
    return {
        **{name: pack.entry[name] for name in names},
        "reproducer": pack.has_reproducer,
        "receipts": dict(zip(("kept", "current"), pack.kept, strict=True)),
        "threads": [{"thread": each.name, "state": each.state, "checked": each.checked} for each in pack.threads],
        "next_step": pack.next_step,
    }
