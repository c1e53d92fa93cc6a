"""`megacpp-overlays compare`: list the changes between two runs that kept their audits."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megacpp_overlays.cli import commands
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add
from megacpp_overlays.errors import AuditFileError
from megacpp_overlays.loader.rendering import aligned
from megacpp_overlays.upkeep import audit_diff

_COLUMNS = ("what", "changed", "before", "after")
_WIDEST = 60
_TEXT = "List the changes between two runs that kept audit().as_dict() as JSON."
_EXAMPLES = (
    "compare audits/yesterday.json audits/today.json",
    "compare --html changes.html audits/yesterday.json audits/today.json",
)
_CODES = {
    ExitCode.CLEAN: "nothing changed",
    ExitCode.FOUND: "something changed",
    ExitCode.USAGE: "wrong usage, or a file is no audit",
    ExitCode.MISSING_EXTRA: "--html, and the extra `upkeep` is not installed",
}


def add_to(subparsers: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(subparsers, "compare", _TEXT, examples=_EXAMPLES, codes=_CODES)
    parser.add_argument(
        "before", type=Path, metavar="A.json", help="the earlier audit, or a report that has it as `audit`"
    )
    parser.add_argument("after", type=Path, metavar="B.json", help="the later one")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page for a browser, too: the later run and the changes"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the changes; return the exit code."""
    try:
        before, after = audit_diff.read(arguments.before), audit_diff.read(arguments.after)
        if arguments.html:
            audit_diff.check_page_fields(after, arguments.after)
    except AuditFileError as error:
        print(f"megacpp-overlays: {error}", file=sys.stderr)
        return ExitCode.USAGE
    found = audit_diff.changes(before, after)
    if arguments.html:
        commands.write_page(arguments.html, after, (arguments.before.name, found))
    hidden = not found and audit_diff.is_hidden(before, after)
    if arguments.json:
        print(json.dumps({"changes": [each._asdict() for each in found], "hidden": hidden}, indent=2))
    elif hidden:
        print(
            "Nothing that the audits show has changed, but their fingerprints differ: something that they do not list has, "
            "such as a file of this package, a setting, the version of Python, torch or triton, or a part of an overlay."
        )
    else:
        print(_table(found) if found else "Nothing has changed.")
    return ExitCode.FOUND if found or hidden else ExitCode.CLEAN


def _table(found: Sequence[audit_diff.Change]) -> str:
    return "\n".join(aligned(_COLUMNS, [tuple(map(_short, change)) for change in found]))


def _short(cell: str | None) -> str:
    text = cell or "-"
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
