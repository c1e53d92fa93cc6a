"""`megacpp-overlays pack`: list the packs, check one before it is sent, and record that a person approved it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections import Counter
from pathlib import Path

from megacpp_overlays.cli import commands as shared
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add
from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.loader import session
from megacpp_overlays.loader.rendering import aligned
from megacpp_overlays.repro import ending, inventory
from megacpp_overlays.upkeep.filing import approvals, filing, standing, wording
from megacpp_overlays.upkeep.filing.checks import Check, CheckOutcome
from megacpp_overlays.upkeep.filing.standing import PackStatus

_TEXT = "List the packs, check one before it is sent, or approve it. Nothing is ever sent."
_LIST = "List every pack: what it is, where it would be sent, and the next step."
_CHECK = "Check a pack before it is sent: run its reproducer now, read its text, look for words that must not get out."
_APPROVE = "Record that a person approved a pack, as it is now, to be sent. Nothing is sent."
_EXAMPLES = ("pack list", "pack check 9", "pack approve 9")
_CODES = {
    ExitCode.CLEAN: "listed, every check holds, or approved",
    ExitCode.FOUND: "a check does not hold",
    ExitCode.NOT_CHECKED: "refused: the pack cannot be checked or approved as it is",
    ExitCode.MISSING_EXTRA: "the extra `upkeep` is not installed",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "pack", _TEXT, examples=_EXAMPLES, codes=_CODES)
    what = parser.add_subparsers(metavar="what", required=True)
    every = what.add_parser("list", help=_LIST, description=_LIST)
    every.set_defaults(run=_list)
    check = what.add_parser("check", help=_CHECK, description=_CHECK)
    check.set_defaults(run=lambda arguments: _check(arguments, check))
    approve = what.add_parser("approve", help=_APPROVE, description=_APPROVE)
    approve.set_defaults(run=_approve)
    for each in (check, approve):
        each.add_argument("number", metavar="NN", type=int, help="number of the pack")
    for each in (every, check, approve):
        each.add_argument("--packs", metavar="FOLDER", type=Path, help="where the packs are, if not in the package")
    for each in (every, check):
        each.add_argument("--json", action="store_true", help="for machines")
    check.add_argument("--tree", metavar="PATH", type=Path, help="run against the packages in this folder")
    check.add_argument("--timeout", metavar="SECONDS", type=float, default=900.0, help="for one process (default 900)")
    text = f"one word or /regular expression/ per line (default FOLDER/{wording.LIST}, where it is)"
    check.add_argument("--private-words", metavar="FILE", type=Path, help=text)
    text = "since each upstream thread was looked at (default 14)"
    check.add_argument("--max-age", metavar="DAYS", type=int, default=14, help=text)


def _list(arguments: argparse.Namespace) -> bool:
    packs = standing.of_all(arguments.packs or inventory.own_folder(), session.current().overlays)
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
    print("\nreceipts: all, and those of the reproducer as it is now. next: megacpp-overlays wave plan")
    return True


def _row(pack: PackStatus) -> tuple[str, ...]:
    entry = pack.entry
    kept, now = pack.kept
    receipts = f"{kept}, {now} now" if pack.has_reproducer else "no reproducer"
    named = [entry["repository"] or "-", entry["upstream"] or "-", entry["priority"] or "-"]
    return (f"{pack.number:02}", entry["class"], entry["state"], *named, receipts, _threads(pack) or "-")


def _threads(pack: PackStatus) -> str:
    return ", ".join(
        f"{count} {state}" for state, count in sorted(Counter(each.state for each in pack.threads).items())
    )


def _as_data(pack: PackStatus) -> dict[str, object]:
    names = ("number", "title", "class", "state", "repository", "upstream", "priority", "overlays")
    return {
        **{name: pack.entry[name] for name in names},
        "reproducer": pack.has_reproducer,
        "receipts": dict(zip(("kept", "current"), pack.kept, strict=True)),
        "threads": [{"thread": each.name, "state": each.state, "checked": each.checked} for each in pack.threads],
        "next_step": pack.next_step,
    }


def _check(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    if arguments.tree is not None and not arguments.tree.is_dir():
        parser.error("--tree: there is no such folder")
    if arguments.tree is not None and os.pathsep in str(arguments.tree.resolve()):
        parser.error(f"--tree: a path with {os.pathsep!r} cannot be on the path of a process")
    with shared.extra():
        from megacpp_overlays.upkeep.filing import preflight  # noqa: PLC0415 - its Markdown parser may not be installed
    folder, overlays = arguments.packs or inventory.own_folder(), session.current().overlays
    pack = standing.of_one(folder, arguments.number, overlays)
    options = preflight.Options(
        tree=arguments.tree,
        timeout=arguments.timeout,
        words=_words(arguments.private_words, folder),
        maximum_age=arguments.max_age,
        show=lambda line: None if arguments.json else print(f"  | {line}", flush=True),
    )
    found: list[Check] = []
    with ending.by_exception():
        for check in preflight.checks(folder, pack, overlays, options):
            found.append(check)
            if not arguments.json:
                _print(len(found), check)
    failed = [check.name for check in found if check.outcome is CheckOutcome.FAILED]
    where = None if failed else str(filing.of(pack))
    if arguments.json:
        print(
            json.dumps({"number": pack.number, "checks": [_check_data(each) for each in found], "how": where}, indent=2)
        )
    elif failed:
        print(f"\npack {pack.number:02} is not to be sent: {len(failed)} of {len(found)} failed: {', '.join(failed)}")
    else:
        print(f"\npack {pack.number:02} may be sent by a person, today: {where}")
    return not failed


def _print(turn: int, check: Check) -> None:
    print(f"{turn}. {check.name}: {check.outcome.value}: {check.reason}", flush=True)
    for detail in check.details:
        print(f"     {detail}")


def _check_data(check: Check) -> dict[str, object]:
    return {
        "name": check.name,
        "outcome": check.outcome.value,
        "reason": check.reason,
        "details": list(check.details),
    }


def _words(given: Path | None, folder: Path) -> wording.Words | None:
    path = given or folder / wording.LIST
    return wording.read_list(path) if given or path.is_file() else None


def _approve(arguments: argparse.Namespace) -> bool:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UpkeepError("an approval needs a person at a terminal, who types the words: nothing is recorded")
    folder = arguments.packs or inventory.own_folder()
    pack = standing.of_one(folder, arguments.number, session.current().overlays)
    given = None
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        given = approvals.approve(folder, pack, print, input)
    if given is None:
        print()
        raise UpkeepError("no answer: nothing is recorded")
    print(f"recorded in {approvals.NAME}. next: megacpp-overlays pack check {pack.number}")
    return True
