"""`megacpp-overlays audit`: import every installed target in this fresh process and say what was decided."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megacpp_overlays.cli import witness
from megacpp_overlays.cli.commands import Subparsers
from megacpp_overlays.errors import AuditFileError, OverlayError, UpkeepError
from megacpp_overlays.loader import session
from megacpp_overlays.loader.audit import Audit
from megacpp_overlays.model import Decision, Erratum, Record
from megacpp_overlays.repro import inventory
from megacpp_overlays.repro.witnessing import WitnessOptions
from megacpp_overlays.source.trees import InstalledTree
from megacpp_overlays.upkeep import audit_diff, requirements

CLEAN, CONFLICT, NOTHING_HERE, NOT_AS_ASKED = 0, 1, 3, 4

_EPILOG = """\
examples:
  megacpp-overlays audit --require liger-flce-none-backward=active,retired
  megacpp-overlays audit --json > audits/lane.json      # once, and look at it
  megacpp-overlays audit --expect audits/lane.json      # in every job of the lane

exit codes:
  0  clean, and as it was asked for
  1  a conflict
  2  wrong usage, or FILE holds no audit
  3  no package is here that an overlay is about: this is not the environment of the launcher
  4  a decision is not one that --require or --expect allows; each is named
"""


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    text = "Import every installed target in a fresh process and print all decisions."
    parser = commands.add_parser(
        "audit", help=text, description=text, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--witness", action="store_true", help="first prove what looks repaired, as `witness` does")
    parser.add_argument(
        "--deep", action="store_true", help="walk over the heap, too, for what holds replaced functions"
    )
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="ID=DECISION",
        help="fail unless this was decided, or one of several with commas between; may be repeated",
    )
    parser.add_argument(
        "--expect", type=Path, metavar="FILE", help="fail unless the decisions are those of a kept audit"
    )
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the audit; return the exit code."""
    current = session.current()
    try:  # before anything is imported: a job that asks in vain need not wait
        required = [requirements.parse(each, current.overlays) for each in arguments.require]
        kept = audit_diff.read(arguments.expect) if arguments.expect else None
    except UpkeepError as error:
        parser.error(f"--require {error}")
    except AuditFileError as error:
        parser.error(f"--expect {error}")
    current.arm()
    if arguments.witness:
        attempts = witness.witness(current, WitnessOptions(packs=inventory.own_folder(), settings=current.settings))
        print(*map(witness.line, attempts), sep="\n", end="\n" if attempts else "", file=sys.stderr)
    audit = pre_flight(current, deep=arguments.deep)
    print(audit.to_json() if arguments.json else audit)
    unmet = requirements.unmet(required, audit)
    if kept is not None:
        unmet += requirements.unexpected(kept, audit)
    for each in unmet:
        print(f"megacpp-overlays: {each}", file=sys.stderr)
    if audit.conflicts:
        return CONFLICT
    if unmet:
        return NOT_AS_ASKED
    if not any(_is_here(overlay) for overlay in current.overlays):
        print(f"megacpp-overlays: {_nothing_here(current.overlays)}", file=sys.stderr)
        return NOTHING_HERE
    return CLEAN


def _is_here(erratum: Erratum) -> bool:
    """Return whether a package is here that one is about, with its target or without it."""
    parts = erratum.target.module.split(".")
    tree = InstalledTree()
    try:
        return any(tree.module(".".join(parts[:depth])) is not None for depth in range(1, len(parts) + 1))
    except OverlayError:  # it is here, and cannot be read
        return True


def _nothing_here(overlays: Sequence[Erratum]) -> str:
    names = ", ".join(sorted({each.target.distribution for each in overlays}))
    return (
        f"none of the packages is here that overlays are about ({names}); run the audit with the Python of the launcher, "
        f"which is not {sys.executable}"
    )


def pre_flight(current: session.Session, *, deep: bool = False) -> Audit:
    """Import every target that is installed, and audit.

    A target that cannot be imported here cannot be vouched for, so it counts as a conflict.
    """
    failures: dict[str, str] = {}
    for record in current.audit().records:
        if record.decision is Decision.ARMED and record.overlay.target.module not in failures:
            try:
                importlib.import_module(record.overlay.target.module)
            except Exception as error:  # noqa: BLE001 - upstream code may fail in any way; the report says how
                failures[record.overlay.target.module] = f"{type(error).__name__}: {error}"
    audit = current.audit(deep=deep)
    return replace(audit, records=tuple(_with_failure(record, failures) for record in audit.records))


def _with_failure(record: Record, failures: dict[str, str]) -> Record:
    failure = failures.get(record.overlay.target.module)
    if record.decision is not Decision.ARMED or failure is None:
        return record
    reason = f"{record.overlay.target.module} is installed but cannot be imported here: {failure}"
    return replace(record, decision=Decision.CONFLICT, reason=reason)
