"""What a run prints and keeps. Nothing in it says where on a disk, or on whose machine, it was made."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

_ABSOLUTE = re.compile(r"(?:(?<=file://)|(?<=-[IL])|(?<![\w./]))/[\w.+@=%~-]+(?:/[\w.+@=%~-]+)+/?")
"""An absolute path of two names or more. A path in a URL follows a name, and a relative one a name or a dot."""


def paths_in(text: str) -> list[str]:
    """Return the absolute paths in a text."""
    return _ABSOLUTE.findall(text)


def scrub(text: str, roots: Iterable[Path] = ()) -> str:
    """Return a text without absolute paths and without the name of this host.

    Args:
        text: any text.
        roots: folders whose files are named from there on, `liger_kernel/ops/x.py`; of other files only the last
            part of the name stays.
    """
    for root in sorted({str(root).rstrip("/") for root in roots}, key=len, reverse=True):
        if root:
            text = re.sub(rf"(?<![\w./]){re.escape(root)}/", "", text)
    text = _ABSOLUTE.sub(lambda found: f".../{found[0].rstrip('/').rpartition('/')[2]}", text)
    node = platform.node()
    return re.sub(rf"(?<![\w.-]){re.escape(node)}(?![\w-])", "<host>", text) if node else text


class Transcript:
    """The lines of one run: what is said is printed, what is noted is printed only when asked for."""

    def __init__(self, roots: Iterable[Path], show: Callable[[str], None], *, verbose: bool = False) -> None:
        """Begin with nothing said.

        Args:
            roots: see `scrub`; the folders of `sys.path` are added.
            show: prints a line.
            verbose: whether to print what is noted, too.
        """
        self._roots = (*roots, *(Path(entry) for entry in sys.path if entry))
        self._show = show
        self._verbose = verbose
        self._lines: list[str] = []

    def say(self, line: str) -> None:
        """Keep one line and print it."""
        self._keep(line)
        self._show(self._lines[-1])

    def note(self, line: str, *, show: bool = False) -> None:
        """Keep one line, such as one that upstream printed; print it when asked to."""
        self._keep(line)
        if self._verbose or show:
            self._show(self._lines[-1])

    def _keep(self, line: str) -> None:
        self._lines.append(scrub(" ".join(line.splitlines()), self._roots))

    @property
    def text(self) -> str:
        """Everything that was kept."""
        return "".join(f"{line}\n" for line in self._lines)
