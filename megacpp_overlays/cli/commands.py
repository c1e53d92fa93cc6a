"""What the commands share: the type of a group of commands, options that several have, and what is not installed."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.model import Erratum
from megacpp_overlays.near_names import suggestion
from megacpp_overlays.repro import inventory

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 - it has no public name
EXTRA = ("bs4", "jinja2", "markdown_it", "pypi_simple", "requests", "tomli")


@contextlib.contextmanager
def extra() -> Iterator[None]:
    """Say how to install what a command needs beyond the run-time dependencies; put around its imports.

    Raises:
        UpkeepError: a library of the extra `upkeep` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        raise UpkeepError(f"this command needs {error.name}: pip install 'megacpp-overlays[upkeep]'") from error


def packs_folder(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> Path:
    """Return the folder of the option `--packs`, or the package's own; end with wrong usage where there is none."""
    folder: Path = arguments.packs or inventory.own_folder()
    if not folder.is_dir():
        parser.error("--packs: there is no such folder")
    return folder


def check_timeout(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End with wrong usage if the option `--timeout` is no time to wait."""
    if arguments.timeout <= 0:
        parser.error("--timeout: seconds, more than 0")


def check_ids(
    ids: Sequence[str], overlays: Sequence[Erratum], parser: argparse.ArgumentParser, option: str = ""
) -> None:
    """End with wrong usage if an id is that of no overlay, and say which may be meant."""
    known = {overlay.id for overlay in overlays}
    if unknown := [name for name in ids if name not in known]:
        head = f"{option}: " if option else ""
        parser.error(f"{head}there is no overlay {', '.join(unknown)}; {suggestion(unknown[0], sorted(known))}")
