"""The command line: parse arguments, call the package, print, and exit with a code that a CI can use."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megacpp_overlays.cli import audit, ledger
from megacpp_overlays.errors import OverlayError
from megacpp_overlays.version import VERSION

CLEAN, CONFLICT, USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0 for clean, 1 for a conflict or a failed check, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="megacpp-overlays", description="Audit the overlays of this environment.")
    parser.add_argument("--version", action="version", version=f"megacpp_overlays {VERSION}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for command in (audit, ledger):
        command.add_to(commands)
    chosen = parser.parse_args(arguments)
    try:
        return CLEAN if chosen.run(chosen) else CONFLICT
    except OverlayError as error:
        print(f"megacpp-overlays: {error}", file=sys.stderr)
        return CONFLICT
