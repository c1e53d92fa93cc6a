"""`megacpp-overlays drift`: is what is installed what was published?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megacpp_overlays.cli.commands import Subparsers
from megacpp_overlays.loader import session

_TEXT = (
    "Compare what is installed in this environment with what was published: files with the hashes in their RECORD, "
    "checkouts with their commit, functions of this process with their source, artifacts with a lock."
)
_CODES = """\
not looked at:
  bytecode in __pycache__, but for the kind that Python never compares with its source
  files beside package folders, and compiled files that a checkout ignores
  data and default arguments (__defaults__) of this process

exit codes:
  0  everything is as published, or an entry of the inventory accounts for it
  1  something differs and nothing accounts for it, or it cannot be checked
  2  wrong usage
"""


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "drift", help=_TEXT, description=_TEXT, epilog=_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--distribution",
        metavar="NAME",
        action="append",
        default=[],
        help="look at this one, and the pins of --lock, only; can be repeated",
    )
    which.add_argument("--all", action="store_true", help="look at every distribution that is installed")
    parser.add_argument("--quick", action="store_true", help="compare sizes and no hashes where RECORD has a size")
    parser.add_argument("--packs", metavar="FOLDER", type=Path, help="the inventory, if not the one in the package")
    parser.add_argument(
        "--import",
        metavar="MODULE",
        dest="modules",
        action="append",
        default=[],
        help="import this module first, then say what it replaced in the targets; can be repeated",
    )
    parser.add_argument(
        "--lock",
        metavar="LOCK",
        type=Path,
        action="append",
        default=[],
        help="compare the whole environment with this lock, and the files of every pin with their RECORD; repeated, "
        "with all of them together",
    )
    parser.add_argument(
        "--wheels",
        metavar="FOLDER",
        type=Path,
        action="append",
        default=[],
        help="where artifacts of the lock are, to tell whether the installed ones are the same; can be repeated",
    )
    parser.add_argument(
        "--exact", action="store_true", help="fail for what the lock does not name and for identities not checked, too"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Print what drifted; return whether nothing did."""
    # The other commands do not need these.
    from megacpp_overlays.repro import inventory  # noqa: PLC0415
    from megacpp_overlays.upkeep import locks  # noqa: PLC0415
    from megacpp_overlays.upkeep.drift import accounts, artifacts, drift, drift_report, installations, running  # noqa: PLC0415

    if not arguments.lock and (arguments.wheels or arguments.exact):
        parser.error("--wheels and --exact need a lock: give --lock, too")
    running.bring_in(arguments.modules)  # first: a launcher may change where packages are found
    overlays = session.current().overlays
    entries = accounts.read(arguments.packs or inventory.own_folder())
    installed = installations.find_all()
    if arguments.distribution:
        names = drift.demand(arguments.distribution, installed)
    else:
        names = drift.usual(overlays, entries)
        names = tuple(sorted({*names, *installed})) if arguments.all else names
    lock = artifacts.merge([locks.read(path) for path in arguments.lock]) if arguments.lock else None
    if lock:  # RECORD alone is compared with the artifact: what it says has to hold for the files
        names = tuple(sorted({*names, *(name for name in lock.pins if name in installed)}))
    outcome = drift_report.Outcome(
        report=drift.examine(
            names, installed, entries, overlays, quick=arguments.quick, required=bool(arguments.distribution)
        ),
        running=running.look() if arguments.modules else None,
        locked=artifacts.compare(lock, installed, arguments.wheels) if lock else None,
        exact=arguments.exact,
    )
    print(json.dumps(outcome.as_dict(), indent=2) if arguments.json else outcome)
    return outcome.clean
