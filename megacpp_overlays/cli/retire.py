"""`megacpp-overlays retire ID`: prepare the commit that removes an overlay which upstream no longer needs."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from megacpp_overlays.cli.commands import Subparsers
from megacpp_overlays.loader import session
from megacpp_overlays.repro import ending
from megacpp_overlays.upkeep.retire import preparation
from megacpp_overlays.upkeep.retire.preparation import Outcome, Request, WrongNameError
from megacpp_overlays.upkeep.retire.retirement import Item

_TEXT = (
    "Prepare the commit that removes an overlay: prove that upstream is right without it, and rewrite what names it."
)
_CODES = """\
It runs in a git checkout of this package, changes files all together or not at all, and never commits.

exit codes:
  0  prepared, or with --dry-run: it could be
  1  refused; the checklist says why
  2  wrong usage
"""


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "retire", help=_TEXT, description=_TEXT, epilog=_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
        help="first release with the repair (default: what a kept matrix says, else what is pinned)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the change as a diff, and make none")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the checklist")
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Do what was asked; return whether the commit can be made."""
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
            outcome = preparation.prepare(request, session.current().overlays, _ignore if arguments.json else _show)
    except WrongNameError as error:
        parser.error(str(error))
    if arguments.json:
        print(json.dumps(_as_dict(outcome), indent=2))
    else:
        print(_report(outcome, dry_run=arguments.dry_run))
    return outcome.prepared


def _show(item: Item) -> None:
    print(f"{item.state.value:<11}  {item.name:<16}  {_short(item.said)}", flush=True)


def _ignore(_: Item) -> None:
    return


def _report(outcome: Outcome, *, dry_run: bool) -> str:
    if not outcome.prepared:
        options = " ".join(item.way_out for item in outcome.items if item.way_out)
        unpatched = f" To let these lanes run unpatched: {options}" if options else ""
        return f"\n{outcome.overlay} stays, and nothing was changed.{unpatched}"
    if dry_run:
        diffs = "\n".join(change.diff() for change in outcome.changes)
        return f"\n{diffs}\nNothing was changed. Without --dry-run it is."
    changed = [f"{change.what:<8} {change.path}" for change in outcome.changes]
    blocks = ["\n".join(["Done:", *(f"  {line}" for line in changed)])]
    if outcome.matrices:
        commands = (f"  {_matrix_command(folder)}" for folder in outcome.matrices)
        blocks.append("\n".join(["Left for you, because a matrix is kept:", *commands]))
    if outcome.mentions:
        lines = (f"  {_short(mention)}" for mention in outcome.mentions)
        blocks.append("\n".join(["Left for you, because they name what is gone:", *lines]))
    if outcome.unused:
        blocks.append(
            "\n".join(["Left for you, because nobody imports them any more:", *map("  {}".format, outcome.unused)])
        )
    blocks.append(f"Then run `make test`, and commit:\n  {_command(outcome)}")
    return "\n" + "\n\n".join(blocks)


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."


def _command(outcome: Outcome) -> str:
    """Return what makes the commit; only these files go into it where others were changed, too."""
    paths = f" -- {shlex.join(change.path for change in outcome.changes)}" if outcome.others else ""
    message = " ".join(f"-m {shlex.quote(paragraph)}" for paragraph in outcome.message)
    return f"git add -A{paths} && git commit {message}{paths}"


def _matrix_command(folder: str) -> str:
    if folder == "packs":
        return "make matrix"
    return f"megacpp-overlays matrix --archives .cache/wheels --write {shlex.quote(folder)}"


def _as_dict(outcome: Outcome) -> dict[str, object]:
    return {
        "overlay": outcome.overlay,
        "prepared": outcome.prepared,
        "checklist": [
            {"item": item.name, "state": item.state.value, "said": item.said, "way_out": item.way_out}
            for item in outcome.items
        ],
        "changes": [{"path": change.path, "what": change.what, "diff": change.diff()} for change in outcome.changes],
        "mentions": list(outcome.mentions),
        "unused": list(outcome.unused),
        "matrices": list(outcome.matrices),
        "message": list(outcome.message),
    }
