"""`megacpp-overlays report`: write one file about one overlay, for its maintainer."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megacpp_overlays.cli.audit import pre_flight
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add, check_ids
from megacpp_overlays.loader import session

_MORE = """\
It has the audit, versions, the evidence of the probe, and for every module that the probe read its hash and a fingerprint of
each function. It has no code but the lines that the evidence quotes, no variables of the environment, and no folders of
this host unless --paths asks for them. Read it before you send it.
"""
_TEXT = "Write a report for the maintainer of one overlay in this environment, such as one in conflict, as JSON."
_EXAMPLES = ("report dsa-capture-gates --output report.json",)
_CODES = {
    ExitCode.CLEAN: "it was written, whatever it says",
    ExitCode.NOT_CHECKED: "FILE cannot be written",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "report", _TEXT, more=_MORE, examples=_EXAMPLES, codes=_CODES)
    parser.add_argument("id", metavar="ID", help="an overlay or a gate")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write it there, and not to standard output")
    parser.add_argument("--paths", action="store_true", help="leave the folders of this host in it")
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Write the report; return that it was written."""
    from megacpp_overlays import files  # noqa: PLC0415 - the other commands do not need these
    from megacpp_overlays.upkeep import form_report  # noqa: PLC0415

    current = session.current()
    check_ids([arguments.id], current.overlays, parser)
    current.arm()
    text = json.dumps(form_report.of(arguments.id, pre_flight(current), paths=arguments.paths), indent=2)
    if arguments.output:
        files.write_text(arguments.output, f"{text}\n")
    else:
        print(text)
    return True
