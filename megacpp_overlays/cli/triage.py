"""`megacpp-overlays triage --from LOCK --to LOCK`, or `--to NAME==VERSION`: print the effect of an upgrade on each overlay."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add, check_ids, check_timeout, packs_folder
from megacpp_overlays.loader import session
from megacpp_overlays.model import Erratum
from megacpp_overlays.repro import ending, inventory
from megacpp_overlays.upkeep import environments, evidence, locks
from megacpp_overlays.upkeep.environments import Environment
from megacpp_overlays.upkeep.triage import preview, release_preview, triage, triage_report

_TEXT = "Print the effect of an upgrade on each overlay: keep, conflict or retire."
_MORE = """\
With --to NAME==VERSION the upgrade starts at the installed release: the records of both releases are compared, in a second.
The reproducers run in the environment of the lock `to`, which takes minutes; where this host cannot run a case, a kept
receipt of the same versions counts. With --quick no reproducer runs: contracts and kept records of both sides are compared, in
seconds.
"""
_EXAMPLES = (
    "triage --to megatron-core==0.19.2",
    "triage --from locks/summer-2026.txt --to locks/newest.txt --quick",
    "triage --from locks/summer-2026.txt --to locks/newest.txt --only liger-flce-none-backward --brief",
)
_CODES = {
    ExitCode.CLEAN: "every overlay is kept, or has nothing to do on either side",
    ExitCode.FOUND: "a conflict, or an overlay past its retirement",
    ExitCode.NOT_CHECKED: "a lock, a release or an environment cannot be used",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "triage", _TEXT, more=_MORE, examples=_EXAMPLES, codes=_CODES)
    parser.add_argument("--from", dest="before", metavar="LOCK", type=Path, help="the lock in use")
    parser.add_argument(
        "--to", dest="after", metavar="LOCK", nargs="+", required=True,
        help="the lock to move to, or releases, each NAME==VERSION, in the place of the installed ones",
    )  # fmt: skip
    parser.add_argument("--only", metavar="ID", action="append", help="triage only this overlay; can be repeated")
    parser.add_argument("--environments", metavar="FOLDER", type=Path, help="environments by lane (default: .envs)")
    parser.add_argument("--from-python", metavar="PYTHON", type=Path, help="interpreter of the environment of --from")
    parser.add_argument("--to-python", metavar="PYTHON", type=Path, help="interpreter of the environment of --to")
    parser.add_argument("--packs", metavar="FOLDER", type=Path, help="where the packs are, if not in the package")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=evidence.TIMEOUT, help="for one process (default 900)"
    )
    parser.add_argument("--quick", action="store_true", help="run no reproducer: print the expected result, in seconds")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--brief", action="store_true", help="print one line for each overlay, and no evidence")
    how.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Print the triage; return whether nothing is in conflict or past its retirement."""
    packs = packs_folder(arguments, parser)
    check_timeout(arguments, parser)
    overlays = session.current().overlays
    check_ids(arguments.only or (), overlays, parser, "--only")
    if all(map(release_preview.is_release, arguments.after)):
        return _to_releases(arguments, parser, overlays)
    if len(arguments.after) > 1 or arguments.before is None:
        parser.error("an upgrade between locks takes --from LOCK and one --to LOCK; releases are NAME==VERSION")
    before, after = locks.read(arguments.before), locks.read(Path(arguments.after[0]))
    triage.changes(before, after, overlays)  # raises before an environment is asked where the locks are the same
    find = functools.partial(environments.of, folder=arguments.environments)
    progress = functools.partial(print, file=sys.stderr, flush=True)
    how = triage.RunOptions(packs=packs, timeout=arguments.timeout, progress=progress)
    with ending.by_exception():
        here = find(before, python=arguments.from_python)
        there = find(after, python=arguments.to_python)
        changes = triage.changes(here.lock, there.lock, overlays)
        chosen = _chosen(overlays, arguments.only)
        if not arguments.json:
            print(triage_report.heading(before, after, changes), flush=True)
        if arguments.quick:
            return _preview(arguments, (here, there), changes, chosen)
        triaged = triage.triage(here, there, chosen, how)
    if arguments.json:
        print(json.dumps(triage_report.as_dict(before, after, changes, triaged), indent=2))
    else:
        print(triage_report.table(triaged, brief=arguments.brief))
    return triage_report.is_clean(triaged)


def _to_releases(arguments: argparse.Namespace, parser: argparse.ArgumentParser, overlays: Sequence[Erratum]) -> bool:
    """Print the preview of a move to releases; return whether nothing in it needs a person or a reproducer."""
    if arguments.before is not None:
        parser.error("--to NAME==VERSION starts at the installed release: leave out --from")
    changes = release_preview.moves(arguments.after, overlays)
    previewed = release_preview.preview(inventory.own_folder(), changes, _chosen(overlays, arguments.only))
    if arguments.json:
        print(json.dumps(triage_report.preview_as_dict(None, None, changes, previewed), indent=2))
    else:
        print(triage_report.heading_of_releases(changes))
        print(triage_report.move_table(previewed))
    return triage_report.is_nothing_expected(previewed)


def _preview(
    arguments: argparse.Namespace,
    sides: tuple[Environment, Environment],
    changes: Sequence[triage.VersionChange],
    overlays: Sequence[Erratum],
) -> bool:
    """Print the preview of a move between locks; return whether nothing in it needs a person or a reproducer."""
    previewed = preview.preview(*sides, overlays)
    if arguments.json:
        before, after = (each.lock for each in sides)
        print(json.dumps(triage_report.preview_as_dict(before, after, changes, previewed), indent=2))
    else:
        print(triage_report.preview_table(previewed))
    return triage_report.is_nothing_expected(previewed)


def _chosen(overlays: Sequence[Erratum], names: Sequence[str] | None) -> tuple[Erratum, ...]:
    return tuple(overlay for overlay in overlays if not names or overlay.id in names)
