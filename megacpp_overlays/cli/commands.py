"""Shared parts of the commands: registration, common options, and errors for extras that are not installed."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from megacpp_overlays import files
from megacpp_overlays.cli.codes import MEANINGS, ExitCode
from megacpp_overlays.errors import MissingExtraError
from megacpp_overlays.loader import session
from megacpp_overlays.model import Erratum
from megacpp_overlays.near_names import suggestion
from megacpp_overlays.repro import inventory
from megacpp_overlays.upkeep import audit_diff

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 - it has no public name
EXTRA = {
    "bs4": "pypi-simple>=1.6",
    "jinja2": "jinja2>=3.1",
    "pypi_simple": "pypi-simple>=1.6",
    "requests": "requests>=2.28",
    "shtab": "shtab>=1.7",
    "tomli": "tomli>=2",
}
"""Top-level modules of the extra `upkeep`, each with the requirement that brings it. The advice names them one by one, because no
index has a distribution of this project: a name without an owner there is not safe to install."""

_WIDTH = 79


class OneSentenceParser(argparse.ArgumentParser):
    """Argument parser whose errors are one sentence and a hint at --help, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        """End with wrong usage."""
        self.exit(ExitCode.USAGE, f"{self.prog}: error: {message}\n(`{self.prog} --help` has the options)\n")


def add(
    commands: Subparsers,
    name: str,
    text: str,
    *,
    examples: Sequence[str],
    codes: Mapping[ExitCode, str],
    more: str = "",
    usage: str | None = None,
    prefix_chars: str = "-",
    add_help: bool = True,
) -> argparse.ArgumentParser:
    """Add a command whose help ends with examples and with its exit codes; return its parser.

    Args:
        commands: the group that gets the command.
        name: name of the command.
        text: description of the command in one sentence.
        examples: the words behind the program's name, such as `audit --json`.
        codes: the meaning of each of its exit codes, `CLEAN` at least; that of wrong usage is added for every command.
        more: further text of the help, printed as it is.
        usage: see `argparse`.
        prefix_chars: see `argparse`.
        add_help: see `argparse`.
    """
    parser = commands.add_parser(
        name,
        help=text,
        description=textwrap.fill(text, _WIDTH),
        epilog=_epilog(examples, codes, more),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=usage,
        prefix_chars=prefix_chars,
        add_help=add_help,
    )
    parser.set_defaults(exit_codes=tuple(codes))
    return parser


def _epilog(examples: Sequence[str], codes: Mapping[ExitCode, str], more: str) -> str:
    meanings: dict[ExitCode, str] = {ExitCode.USAGE: MEANINGS[ExitCode.USAGE], **codes}
    shown = [line for code in sorted(meanings) for line in _entry(f"  {int(code)}  ", meanings[code])]
    head = [f"{more.strip()}\n"] if more else []
    return "\n".join(
        [*head, "examples:", *(f"  megacpp-overlays {each}" for each in examples), "", "exit codes:", *shown]
    )


def _entry(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))


@contextlib.contextmanager
def extra() -> Iterator[None]:
    """Turn a missing library of the extra into advice how to install it; a context around the imports of a command.

    Raises:
        MissingExtraError: a library of the extra `upkeep` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        raise MissingExtraError(
            f"this command needs {error.name}, of the extra `upkeep`: {_how_to_install()}"
        ) from error


def extra_requirements() -> dict[str, str]:
    """Return the requirements of the extra `upkeep` on this Python, by top-level module."""
    return {name: text for name, text in EXTRA.items() if not (name == "tomli" and sys.version_info >= (3, 11))}


def _how_to_install() -> str:
    names = dict.fromkeys(extra_requirements().values())
    return f"pip install {shlex.join(names)}, or in a clone pip install '.[upkeep]'"


def write_page(
    path: Path, audit: Mapping[str, Any], compared: tuple[str, Sequence[audit_diff.Change]] | None = None
) -> None:
    """Write the page of a run.

    Args:
        path: the file of the page.
        audit: the audit of the run, as plain data.
        compared: name of the earlier audit, and the changes since.

    Raises:
        MissingExtraError: the extra `upkeep` is not installed.
    """
    with extra():
        from megacpp_overlays.upkeep.pages import run_page  # noqa: PLC0415
    run = run_page.RunOnPage(audit, datetime.now(timezone.utc), run_page.agreement(audit), compared)
    files.write_text(path, run_page.render(run, session.current().overlays, inventory.own_folder()))


def packs_folder(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> Path:
    """Return the folder of the option `--packs`, or the package's own; end with wrong usage where there is none."""
    folder: Path = arguments.packs or inventory.own_folder()
    if not folder.is_dir():
        parser.error("--packs: there is no such folder")
    return folder


def check_timeout(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End with wrong usage if the option `--timeout` is not positive."""
    if arguments.timeout <= 0:
        parser.error("--timeout: seconds, more than 0")


def check_ids(
    ids: Sequence[str], overlays: Sequence[Erratum], parser: argparse.ArgumentParser, option: str = ""
) -> None:
    """End with wrong usage if an id is that of no overlay; the error suggests the nearest id."""
    known = {overlay.id for overlay in overlays}
    if unknown := [name for name in ids if name not in known]:
        head = f"{option}: " if option else ""
        near = suggestion(unknown[0], sorted(known), where="`megacpp-overlays audit`")
        parser.error(f"{head}there is no overlay {', '.join(unknown)}; {near}")
