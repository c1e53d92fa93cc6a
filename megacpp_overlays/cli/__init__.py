"""Command line: parses arguments, calls the package, prints, and exits with a code that a CI can use."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import textwrap
from collections.abc import Sequence
from types import ModuleType
from typing import TextIO, cast

from megacpp_overlays.cli import (
    audit,
    checkpoint,
    codes,
    compare,
    completion,
    disable,
    drift,
    enable,
    env,
    explain,
    info,
    learn,
    ledger,
    matrix,
    new_overlay,
    pack,
    receipts,
    reference,
    rehearse,
    report,
    repro,
    retire,
    run,
    status,
    sweep,
    symptom,
    triage,
    witness,
)
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import OneSentenceParser, Subparsers
from megacpp_overlays.errors import OverlayError
from megacpp_overlays.near_names import suggestion
from megacpp_overlays.terminal_text import PlainStream
from megacpp_overlays.version import VERSION

FOR_A_RUN = (audit, explain, symptom, info, run, compare, drift, repro, witness, checkpoint, report)
FOR_AN_IMAGE = (enable, disable, status, env)
FOR_THE_LANE = (
    new_overlay,
    ledger,
    reference,
    matrix,
    learn,
    rehearse,
    triage,
    sweep,
    retire,
    receipts,
    pack,
    completion,
)

_EXAMPLES = (
    "audit                                   # the repairs here, and their reasons",
    "audit --quick                           # the same from files, in a second or two",
    "symptom loss jumps after resume         # is it one of these?",
    "run train.py --steps 10                 # a launcher without an edit",
    "repro 9                                 # see a defect, and see it gone",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code, see `codes`."""
    with contextlib.ExitStack() as stack:
        if sys.stdout is not None:
            stack.enter_context(contextlib.redirect_stdout(cast("TextIO", PlainStream(sys.stdout))))
        if sys.stderr is not None:
            stack.enter_context(contextlib.redirect_stderr(cast("TextIO", PlainStream(sys.stderr))))
        return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    parser, commands = parsers()
    chosen = _parse(parser, commands, sys.argv[1:] if arguments is None else arguments)
    try:
        outcome: bool | int = chosen.run(chosen)
        sys.stdout.flush()
    except OverlayError as error:
        print(f"megacpp-overlays: {error}", file=sys.stderr)
        return codes.of(error)
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe. Python flushes once more at its end, which must not raise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.CLOSED_OUTPUT
    except OSError as error:  # a file that was named cannot be read or written
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"megacpp-overlays: {where}{error.strerror or error}", file=sys.stderr)
        return ExitCode.NOT_CHECKED
    if isinstance(outcome, bool):
        return ExitCode.CLEAN if outcome else ExitCode.FOUND
    return outcome


class _GroupedHelp(argparse.RawDescriptionHelpFormatter):
    """Help formatter without argparse's own list of commands, which has no groups."""

    def add_argument(self, action: argparse.Action) -> None:
        if not isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - it has no public name
            super().add_argument(action)


def parsers() -> tuple[argparse.ArgumentParser, Subparsers]:
    """Return the parser of the command line and the group of its commands."""
    parser: argparse.ArgumentParser = OneSentenceParser(
        prog="megacpp-overlays",
        description="Overlays over defects of training libraries: the repairs in this environment, and their reasons.",
        formatter_class=_GroupedHelp,
    )
    parser.add_argument("--version", action="version", version=f"megacpp_overlays {VERSION}")
    commands: Subparsers = parser.add_subparsers(metavar="command", required=True, parser_class=OneSentenceParser)
    for each in (*FOR_A_RUN, *FOR_AN_IMAGE, *FOR_THE_LANE):
        each.add_to(commands)
    parser.epilog = "\n".join(
        [
            "each command has its own --help",
            "",
            "for a run:",
            *_listed(commands, FOR_A_RUN),
            "",
            "for an environment or an image:",
            *_listed(commands, FOR_AN_IMAGE),
            "",
            "for keeping a lane:",
            *_listed(commands, FOR_THE_LANE),
            "",
            "examples:",
            *(f"  megacpp-overlays {each}" for each in _EXAMPLES),
        ]
    )
    return parser, commands


def _listed(commands: Subparsers, chosen: Sequence[ModuleType]) -> list[str]:
    lines: list[str] = []
    for each in chosen:
        name = each.__name__.rpartition(".")[2].replace("_", "-")
        text = " ".join((commands.choices[name].description or "").split())
        lines += textwrap.wrap(text, 79, initial_indent=f"  {name:12}", subsequent_indent=" " * 14)
    return lines


def _parse(parser: argparse.ArgumentParser, commands: Subparsers, words: Sequence[str]) -> argparse.Namespace:
    """Parse words, or end with wrong usage; for a misspelt command or option the error suggests the nearest name."""
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
    """Return the parser of the command or subcommand that words name."""
    for action in parser._actions:  # noqa: SLF001 - no other name
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - no other name
            for number, word in enumerate(words):
                if word in action.choices:
                    return _command(action.choices[word], words[number + 1 :])
    return parser
