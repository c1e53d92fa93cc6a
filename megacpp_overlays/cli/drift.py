"""`megacpp-overlays drift`: compare the installed and loaded code with the published code."""

from __future__ import annotations

import argparse
import json

from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add
from megacpp_overlays.loader import session

_TEXT = (
    "Compare the packages of this environment with the published ones: files with the hashes in their RECORD, "
    "checkouts with their commit, functions of this process with the package that they belong to."
)
_MORE = """\
not looked at:
  bytecode in __pycache__, but for the kind that Python never compares with its source
  files next to package folders, and compiled files that a checkout ignores
  data and default arguments (__defaults__) of this process
  in this process, changes within a package and the libraries that its modules import: one function of it in the
  place of another, one of its own decorators more, a deleted name, a library's function under an imported name
"""
_EXAMPLES = ("drift", "drift --distribution megatron-core", "drift --import megatron.core.models.gpt")
_CODES = {
    ExitCode.CLEAN: "everything is as published, except for the replacements by overlays",
    ExitCode.FOUND: "something differs, or a file of it cannot be read",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "drift", _TEXT, more=_MORE, examples=_EXAMPLES, codes=_CODES)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--distribution",
        metavar="NAME",
        action="append",
        default=[],
        help="look at this one only; can be repeated",
    )
    which.add_argument("--all", action="store_true", help="look at every distribution that is installed")
    parser.add_argument("--quick", action="store_true", help="compare sizes and no hashes where RECORD has a size")
    parser.add_argument(
        "--import",
        metavar="MODULE",
        dest="modules",
        action="append",
        default=[],
        help="import this module first, then list the names of the targets that lead to third-party code; can be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> bool:
    """Print the drift; return whether there is none."""
    # The other commands do not need these.
    from megacpp_overlays.processes import startup_file  # noqa: PLC0415
    from megacpp_overlays.upkeep.drift import drift, drift_report, installations, substitutions  # noqa: PLC0415

    if arguments.modules:
        session.current().arm()  # as in a run of the launcher's plugin
    substitutions.bring_in(arguments.modules)  # first: a launcher may change where packages are found
    overlays = session.current().overlays
    installed = installations.find_all()
    if arguments.distribution:
        names = drift.demand(arguments.distribution, installed)
    else:
        names = drift.usual(overlays)
        names = tuple(sorted({*names, *installed})) if arguments.all else names
    outcome = drift_report.DriftOutcome(
        report=drift.examine(names, installed, overlays, quick=arguments.quick, required=bool(arguments.distribution)),
        process=substitutions.look() if arguments.modules else None,
        startup=() if arguments.distribution else tuple(startup_file.found()),
    )
    print(json.dumps(outcome.as_dict(), indent=2) if arguments.json else outcome)
    return outcome.clean
