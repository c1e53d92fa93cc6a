"""`megacpp-overlays audit`: import every installed target in this fresh process and say what was decided."""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import replace

from megacpp_overlays.cli import witness
from megacpp_overlays.cli.commands import Subparsers
from megacpp_overlays.loader import session
from megacpp_overlays.loader.audit import Audit
from megacpp_overlays.model import Decision, Record
from megacpp_overlays.repro import inventory
from megacpp_overlays.repro.witnessing import WitnessOptions


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    text = "Import every installed target in a fresh process and print all decisions."
    parser = commands.add_parser("audit", help=text, description=f"{text} Exit code 1 means conflict.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--witness", action="store_true", help="first prove what looks repaired, as `witness` does")
    parser.add_argument(
        "--deep", action="store_true", help="walk over the heap, too, for what holds replaced functions"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> bool:
    """Print the audit; return whether it is clean."""
    current = session.current()
    if arguments.witness:
        attempts = witness.witness(current, WitnessOptions(packs=inventory.own_folder(), settings=current.settings))
        print(*map(witness.line, attempts), sep="\n", end="\n" if attempts else "", file=sys.stderr)
    audit = pre_flight(current, deep=arguments.deep)
    print(audit.to_json() if arguments.json else audit)
    return not audit.conflicts


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
