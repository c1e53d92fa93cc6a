"""`megacpp-overlays reference`: write or check the pages of docs/ that are generated from the code."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

from megacpp_overlays import files
from megacpp_overlays.cli import codes
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add
from megacpp_overlays.loader import session
from megacpp_overlays.repro import inventory
from megacpp_overlays.upkeep import reference_pages, symptoms
from megacpp_overlays.upkeep.settings_page import settings_page

_TEXT = "Write or check the pages of docs/ that are generated: settings, commands, symptoms and overlays."
_EXAMPLES = ("reference --check docs", "reference --write docs")
_CODES = {
    ExitCode.CLEAN: "written, or in step",
    ExitCode.FOUND: "a page is not in step",
    ExitCode.NOT_CHECKED: "a page cannot be read or written",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "reference", _TEXT, examples=_EXAMPLES, codes=_CODES)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", metavar="FOLDER", type=Path, help="exit 1 when a page in FOLDER is not in step")
    action.add_argument("--write", metavar="FOLDER", type=Path, help="bring the pages in FOLDER in step")
    parser.set_defaults(run=functools.partial(run, commands, parser))


def run(commands: Subparsers, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> bool:
    """Run the command; return whether the pages are in step."""
    folder: Path = arguments.write or arguments.check
    if not folder.is_dir():
        parser.error(f"{folder}: there is no such folder")
    overlays = session.current().overlays
    pages = {
        "settings.md": settings_page(overlays, reference_pages.GENERATED),
        "commands.md": reference_pages.commands_page(commands.choices, list(codes.MEANINGS.items())),
        "symptoms.md": symptoms.page(
            overlays, reference_pages.broken_ranges(overlays, inventory.own_folder()), reference_pages.GENERATED
        ),
        "overlays.md": reference_pages.overlays_page(overlays, inventory.own_folder()),
    }
    if arguments.write is not None:
        for name, text in pages.items():
            files.write_text(folder / name, text)
        return True
    found = reference_pages.difference(pages, folder)
    print(found or f"{folder} is in step", file=sys.stderr if found else sys.stdout)
    return not found
