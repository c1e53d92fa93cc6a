"""`megacpp-overlays completion SHELL`: print the completion script of a shell for commands, options and files."""

from __future__ import annotations

import argparse

from megacpp_overlays import cli
from megacpp_overlays.cli import commands as shared
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add

SHELLS = ("bash", "zsh", "tcsh")

_TEXT = "Print the script with which a shell completes the commands and options of megacpp-overlays."
_EXAMPLES = (
    "completion bash > ~/.local/share/bash-completion/completions/megacpp-overlays",
    "completion zsh > ~/.zfunc/_megacpp-overlays      # a folder of $fpath",
)
_CODES = {
    ExitCode.CLEAN: "printed",
    ExitCode.MISSING_EXTRA: "the extra `upkeep` is not installed",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "completion", _TEXT, examples=_EXAMPLES, codes=_CODES)
    parser.add_argument("shell", type=str.lower, choices=SHELLS, help="for which shell")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> bool:
    """Print the completion script of a shell."""
    with shared.extra():
        import shtab  # noqa: PLC0415
    parser, _ = cli.parsers()
    print(shtab.complete(parser, arguments.shell))
    return True
