"""The command line: parse arguments, call the package, print, and exit with a code that a CI can use."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TextIO, cast

from megacpp_overlays.cli import (
    audit,
    checkpoint,
    compare,
    drift,
    ledger,
    matrix,
    pack,
    receipts,
    reference,
    report,
    repro,
    retire,
    run,
    sweep,
    triage,
    wave,
    witness,
)
from megacpp_overlays.cli.commands import Subparsers
from megacpp_overlays.errors import OverlayError, SettingsError
from megacpp_overlays.near_names import suggestion
from megacpp_overlays.terminal_text import PlainStream
from megacpp_overlays.version import VERSION

CLEAN, CONFLICT, USAGE = 0, 1, 2
NOBODY_READS = 141
"""What a shell says of a command that SIGPIPE ended: whoever reads has seen enough, and nobody knows of a conflict."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0 for clean, 1 for a conflict or a failed check, 2 for wrong usage, or its own code."""
    with contextlib.ExitStack() as stack:
        if sys.stdout is not None:
            stack.enter_context(contextlib.redirect_stdout(cast("TextIO", PlainStream(sys.stdout))))
        if sys.stderr is not None:
            stack.enter_context(contextlib.redirect_stderr(cast("TextIO", PlainStream(sys.stderr))))
        return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="megacpp-overlays", description="Audit the overlays of this environment.")
    parser.add_argument("--version", action="version", version=f"megacpp_overlays {VERSION}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for command in (
        *(audit, witness, compare, run, checkpoint, report),
        *(ledger, reference, matrix, triage, drift, sweep, retire),
        *(repro, receipts, pack, wave),
    ):
        command.add_to(commands)
    chosen = _parse(parser, commands, sys.argv[1:] if arguments is None else arguments)
    try:
        outcome: bool | int = chosen.run(chosen)
        sys.stdout.flush()
    except OverlayError as error:
        print(f"megacpp-overlays: {error}", file=sys.stderr)
        return USAGE if isinstance(error, SettingsError) else CONFLICT
    except BrokenPipeError:
        # Whoever reads, such as `head`, has seen enough. Python flushes once more at its end, which must not raise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS
    except OSError as error:  # a file that was named cannot be read or written
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"megacpp-overlays: {where}{error.strerror or error}", file=sys.stderr)
        return CONFLICT
    if isinstance(outcome, bool):
        return CLEAN if outcome else CONFLICT
    return outcome


def _parse(parser: argparse.ArgumentParser, commands: Subparsers, words: Sequence[str]) -> argparse.Namespace:
    """Parse words, or end with wrong usage: of a command or an option that is misspelt it says which is near."""
    known = list(commands.choices)
    if words and not words[0].startswith("-") and words[0] not in known:
        parser.error(f"there is no command {words[0]}; {suggestion(words[0], known)}")
    chosen, unknown = parser.parse_known_args(words)
    if unknown:
        command = _command(parser, words)
        options = [each for each in command._option_string_actions if each.startswith("--")]  # noqa: SLF001 - no other name
        near = f"; {suggestion(unknown[0], options)}" if unknown[0].startswith("--") else ""
        command.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
    return chosen


def _command(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the command, or of the command of a command, that words name."""
    for action in parser._actions:  # noqa: SLF001 - no other name
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - no other name
            for number, word in enumerate(words):
                if word in action.choices:
                    return _command(action.choices[word], words[number + 1 :])
    return parser
