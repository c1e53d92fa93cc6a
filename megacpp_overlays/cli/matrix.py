"""`megacpp-overlays matrix`: not written yet."""

from __future__ import annotations

import argparse

from megacpp_overlays.cli.commands import Subparsers


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("matrix")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> bool:
    """Do what was asked."""
    raise NotImplementedError
