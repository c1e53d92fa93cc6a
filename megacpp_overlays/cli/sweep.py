"""`megacpp-overlays sweep`: check the state of the upstream threads that overlays link."""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import date, datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from megacpp_overlays.cli import commands
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add
from megacpp_overlays.loader import session
from megacpp_overlays.repro import inventory

if TYPE_CHECKING:
    from megacpp_overlays.upkeep.sweep.github import Client

_TEXT = (
    "Check every linked upstream issue and pull request, list those that landed since the last check, and the overlays "
    "that may be retired for that."
)
_MORE = """\
Without a network the saved answers of packs/threads.json are used. A thread that is merged and released does not change any more;
the report gives the age of every other answer.

environment: GITHUB_TOKEN or GH_TOKEN (without one GitHub takes 60 requests an hour), GITHUB_API_URL.
"""
_EXAMPLES = ("sweep", "sweep --write", "sweep --offline --max-age 90", "sweep --since 2026-11-01")
_CODES = {
    ExitCode.CLEAN: "nothing to do",
    ExitCode.FOUND: "something landed, is declared otherwise, or got no answer",
    ExitCode.NOT_CHECKED: "the token is refused, or a file cannot be read",
    ExitCode.MISSING_EXTRA: "without --offline, and the extra `upkeep` is not installed",
    ExitCode.OLD: "nothing to do in the saved answers, but some of them are older than --max-age",
}
MAX_AGE_DAYS = 30


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "sweep", _TEXT, more=_MORE, examples=_EXAMPLES, codes=_CODES)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--offline", action="store_true", help="use the saved answers, without a network")
    write_help = (
        "keep the new answers in packs/threads.json; a kept thread is not asked for again on the same day (UTC)"
    )
    source.add_argument("--write", action="store_true", help=write_help)
    parser.add_argument("--since", metavar="DATE", type=_day, help="list the events on or after this day (UTC)")
    parser.add_argument(
        "--max-age",
        metavar="DAYS",
        type=int,
        default=MAX_AGE_DAYS,
        help=f"of a saved answer that may have changed since (default {MAX_AGE_DAYS}); an older one is no answer",
    )
    parser.add_argument("--json", action="store_true", help="print for machines")
    parser.add_argument("--packs", metavar="FOLDER", type=Path, help="where the packs are, if not in the package")
    parser.add_argument("--api", metavar="URL", help="address of the API, if it is not https://api.github.com")
    parser.set_defaults(run=run)


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no day such as 2026-07-30") from error


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    from megacpp_overlays.upkeep.sweep import host_errors, sweep, sweep_report, threads, waiting  # noqa: PLC0415

    folder = arguments.packs or inventory.own_folder()
    saved = threads.read(folder)
    waited = waiting.listed(session.current().overlays, folder)
    today = datetime.now(timezone.utc).date()
    swept = sweep.from_saved(waited, saved, today, arguments.since)
    if not arguments.offline:
        with commands.extra():  # --offline needs no HTTP library
            from megacpp_overlays.upkeep.sweep import github  # noqa: PLC0415
        api = arguments.api or os.environ.get("GITHUB_API_URL") or github.DEFAULT
        client = github.Client(api, _token())
        try:
            swept = sweep.from_host(waited, saved, client, today, arguments.since)
            _say(f"{client.asked} requests to {client.api}{_budget(client)}")
        except host_errors.UnreachableError as error:
            _say(f"{error}; using the saved answers")
    if arguments.write and swept.online:
        threads.write(folder, swept.answers(saved))
    print(json.dumps(sweep_report.data(swept), indent=2) if arguments.json else "\n".join(sweep_report.lines(swept)))
    if swept.online and not arguments.write and swept.answers(saved) != list(saved.values()):
        _say("nothing was kept; --write keeps these answers")
    old = swept.older_than(arguments.max_age)
    if old:
        _say(
            f"{len(old)} answers are more than {arguments.max_age} days old (--max-age), {old[0]} the oldest of them: ask again "
            "with a network, and keep the answers with --write"
        )
    if not swept.clean:
        return ExitCode.FOUND
    return ExitCode.OLD if old else ExitCode.CLEAN


def _token() -> str | None:
    return os.environ.get("GITHUB_TOKEN", "").strip() or os.environ.get("GH_TOKEN", "").strip() or None


def _budget(client: Client) -> str:
    return "" if client.left is None else f", {client.left} left"


def _say(text: str) -> None:
    print(text, file=sys.stderr)
