"""`megacpp-overlays disable`: remove the start-up file of this environment."""

from __future__ import annotations

import argparse

from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add
from megacpp_overlays.processes import startup_file

_TEXT = "Remove the .pth file that `enable` wrote: no Python of this environment is armed at its start any more."
_EXAMPLES = ("disable",)
_CODES = {
    ExitCode.CLEAN: "removed, or there was none",
    ExitCode.NOT_CHECKED: "the file cannot be removed",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    add(commands, "disable", _TEXT, examples=_EXAMPLES, codes=_CODES).set_defaults(run=run)


def run(_: argparse.Namespace) -> bool:
    """Remove the file, and print its path."""
    removed = startup_file.disable()
    for path in removed:
        print(f"disabled: {path} is removed")
    if not removed:
        print(f"there is no {startup_file.NAME} in {', '.join(map(str, startup_file.folders()))}")
    return True
