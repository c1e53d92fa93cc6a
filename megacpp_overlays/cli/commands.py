"""What the commands share: the type of a group of commands, and a word about what is not installed."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import TypeAlias

from megacpp_overlays.errors import UpkeepError

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
