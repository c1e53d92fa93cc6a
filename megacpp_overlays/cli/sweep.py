"""`megacpp-overlays sweep`: what became of the upstream threads that the lane waits on."""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import date, datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from megacpp_overlays.cli import commands
from megacpp_overlays.cli.commands import Subparsers
from megacpp_overlays.loader import session
from megacpp_overlays.repro import inventory

if TYPE_CHECKING:
    from megacpp_overlays.upkeep.sweep.github import Client

_TEXT = (
    "Look at every linked upstream issue and pull request, say what landed since the last look, and which overlay that "
    "puts up for retirement."
)
_END = (
    "Without a network the saved answers of packs/threads.json are used. exit code: 0 nothing to do, 1 something landed, "
    "is declared otherwise, or got no answer, 2 wrong usage. environment: GITHUB_TOKEN or GH_TOKEN (without one GitHub "
    "takes 60 requests an hour), GITHUB_API_URL."
)


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("sweep", help=_TEXT, description=_TEXT, epilog=_END)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--offline", action="store_true", help="ask nobody, use the saved answers")
    keep = "keep the new answers in packs/threads.json; what is kept is not asked for again on the same day (UTC)"
    what.add_argument("--write", action="store_true", help=keep)
    parser.add_argument("--since", metavar="DATE", type=_day, help="tell what happened on or after this day (UTC)")
    parser.add_argument("--json", action="store_true", help="print for machines")
    parser.add_argument("--packs", metavar="FOLDER", type=Path, help="where the packs are, if not in the package")
    parser.add_argument("--api", metavar="URL", help="address of the API, if it is not https://api.github.com")
    parser.add_argument("--cache", metavar="FOLDER", type=Path, help="where answers and their ETags are kept")
    parser.set_defaults(run=run)


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no day such as 2026-07-30") from error


def run(arguments: argparse.Namespace) -> bool:
    """Do what was asked; return whether there is nothing to do."""
    with commands.extra():
        from megacpp_overlays.upkeep.sweep import github, sweep, sweep_report, threads, waiting  # noqa: PLC0415
    folder = arguments.packs or inventory.own_folder()
    saved = threads.read(folder)
    waited = waiting.listed(session.current().overlays, folder)
    today = datetime.now(timezone.utc).date()
    swept = sweep.from_saved(waited, saved, today, arguments.since)
    if not arguments.offline:
        api = arguments.api or os.environ.get("GITHUB_API_URL") or github.DEFAULT
        client = github.Client(api, _token(), arguments.cache or _cache())
        try:
            swept = sweep.from_host(waited, saved, client, today, arguments.since)
            _say(f"{client.asked} requests to {client.api}, {client.unchanged} of them unchanged{_budget(client)}")
        except github.UnreachableError as error:
            _say(f"{error}; using the saved answers")
    if arguments.write and swept.online:
        threads.write(folder, swept.answers(saved))
    print(json.dumps(sweep_report.data(swept), indent=2) if arguments.json else "\n".join(sweep_report.lines(swept)))
    if swept.online and not arguments.write and swept.answers(saved) != list(saved.values()):
        _say("nothing was kept; --write keeps these answers")
    return swept.clean


def _token() -> str | None:
    return os.environ.get("GITHUB_TOKEN", "").strip() or os.environ.get("GH_TOKEN", "").strip() or None


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megacpp-overlays" / "threads"


def _budget(client: Client) -> str:
    return "" if client.left is None else f", {client.left} left"


def _say(text: str) -> None:
    print(text, file=sys.stderr)
