"""`megacpp-overlays rehearse`: rehearse the release day of the installed version, without knowledge of that version."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from packaging.version import InvalidVersion, Version

from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add
from megacpp_overlays.cli.witness import default_workers
from megacpp_overlays.loader import session
from megacpp_overlays.near_names import suggestion
from megacpp_overlays.upkeep import rehearsal

_TEXT = "Rehearse an upgrade: forget everything newer than a release, and print the decisions here without and with `witness`."
_MORE = """\
It measures how much this package knows by behaviour and not by text. It audits this environment with all that is known, then
without the records of releases after VERSION, proves the overlays that are then unproved in a folder of its own, and audits again.
Nothing of it stays. It takes minutes.
"""
_EXAMPLES = (
    "rehearse --known-until megatron-core=0.18.2",
    "rehearse --known-until megatron-core=0.17.1 --tree unpacked/megatron_core-0.18.0",
)
_CODES = {
    ExitCode.CLEAN: "nothing was installed that must not be, and nothing retired that is needed",
    ExitCode.FOUND: "something was",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "rehearse", _TEXT, more=_MORE, examples=_EXAMPLES, codes=_CODES)
    parser.add_argument(
        "--known-until", metavar="DISTRIBUTION=VERSION", required=True, help="the newest release that is remembered"
    )
    parser.add_argument("--tree", metavar="PATH", type=Path, help="a folder that holds the packages of another release")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--workers", metavar="N", type=int, default=default_workers(), help="overlays at the same time")
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def _check(text: str, distribution: str, version: str, parser: argparse.ArgumentParser) -> None:
    """End with wrong usage, before minutes of reproducers, where the option names no target or no version."""
    known = sorted({each.target.distribution for each in session.current().overlays})
    if distribution not in known:
        parser.error(f"--known-until {text}: no overlay is about {distribution}; {suggestion(distribution, known)}")
    try:
        Version(version)
    except InvalidVersion:
        parser.error(f"--known-until {text}: {version!r} is no version")


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Rehearse, print, and return the exit code."""
    distribution, sign, version = arguments.known_until.partition("=")
    if not sign:
        parser.error(f"--known-until {arguments.known_until}: DISTRIBUTION=VERSION is wanted")
    _check(arguments.known_until, distribution, version, parser)
    if arguments.tree and not arguments.tree.is_dir():
        parser.error(f"--tree {arguments.tree}: there is no such folder")
    path = [*([str(arguments.tree.resolve())] if arguments.tree else []), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as folder:
        found = rehearsal.rehearse(
            arguments.known_until,
            distribution,
            Path(folder),
            {"PYTHONPATH": os.pathsep.join(filter(None, path))},
            arguments.workers,
        )
    print(json.dumps(found.as_dict(), indent=2) if arguments.json else "\n".join(rehearsal.lines(found)))
    return ExitCode.FOUND if found.wrong else ExitCode.CLEAN
