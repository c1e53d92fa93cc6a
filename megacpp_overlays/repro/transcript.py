"""The transcript of a reproducer run, printed and kept. It names no path and no host.

Paths are taken out of every line. The names of the host and of the user, and addresses, are taken out of what others
wrote: the output of upstream and the words of a case. Our own words stay, also on a host that is named like one.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

_PART = r"[\w.+@=%~-]+"
_BEFORE = r"(?:(?<=file://)|(?<=-[IL])|(?<=-isystem)|(?<=-iquote)|(?<=-include)|(?<=\\[nrt])|(?<![\w./]))"
_ABSOLUTE = re.compile(rf"{_BEFORE}/{_PART}(?:/{_PART})+/?")
"""An absolute path of two names or more. A path in a URL follows a name, and a relative one a name or a dot."""
_QUOTED = re.compile(r"(?<=[\"'])/[\w.+@=%~ -]+(?:/[\w.+@=%~ -]+)+(?=[\"'])")
_CLIMBING = re.compile(rf"(?<![\w./])(?:\.\./){{2,}}{_PART}(?:/{_PART})*/?")
_COLOUR = re.compile(r"(?:\x1b|\\x1b|\\033)\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)")
_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_ADDRESS = re.compile(rf"(?:(?<=//)|(?<![\w./-]))(?!127\.|0\.0\.0\.0){_OCTET}(?:\.{_OCTET}){{3}}(?![\w-]|\.\d)")
_NOBODY = {"localhost", "root"}


def paths_in(text: str) -> list[str]:
    """Return the absolute paths in a text."""
    return _ABSOLUTE.findall(text)


def scrub(text: str, roots: Iterable[Path] = ()) -> str:
    """Return a text of others without absolute paths, names of this host and its user, and addresses.

    Args:
        text: any text.
        roots: see `without_paths`.
    """
    return _without_names(without_paths(text, roots))


def without_paths(text: str, roots: Iterable[Path] = ()) -> str:
    """Return a text without absolute paths, colours and what cannot be encoded.

    Args:
        text: any text.
        roots: folders whose files are named from there on, `liger_kernel/ops/x.py`; of other files only the last
            part of the name stays.
    """
    text = _COLOUR.sub("", text.encode(errors="backslashreplace").decode())
    for root in sorted({str(root).rstrip("/") for root in roots}, key=len, reverse=True):
        if root:
            text = re.sub(f"{_before(root)}{re.escape(root)}/", "", text)
    for root in _own_folders():
        text = re.sub(f"{_before(root)}{re.escape(root)}(?![\\w-])(?:/{_PART})*/?", _last, text)
    for pattern in (_QUOTED, _ABSOLUTE, _CLIMBING):
        text = pattern.sub(lambda found: f".../{found[0].rstrip('/').rpartition('/')[2]}", text)
    return text


def _before(root: str) -> str:
    if not root.startswith("/"):
        return r"(?<=\.\./)"
    # `/tmp` may be the middle of a relative path; a root of several names is itself, whatever precedes it.
    return "" if root.count("/") > 1 else _BEFORE


def _last(found: re.Match[str]) -> str:
    below = found[0].rstrip("/").rpartition("/")[2]
    own = {root.rpartition("/")[2] for root in _own_folders()}
    return "..." if below in own else f".../{below}"


def _own_folders() -> list[str]:
    """Return the folders that say whose machine this is, the longest first; of home also the way down to it."""
    folders = {os.path.expanduser("~"), tempfile.gettempdir(), os.getcwd(), sys.prefix, sys.base_prefix}
    folders |= {os.path.realpath(folder) for folder in folders}
    home = os.path.expanduser("~").strip("/")
    named = {folder.rstrip("/") for folder in folders if folder.startswith("/")} | ({home} if "/" in home else set())
    return sorted((folder for folder in named if folder), key=len, reverse=True)


def _without_names(text: str) -> str:
    node = platform.node()
    label, _, domain = node.partition(".")
    if _is_telling(label):
        text = re.sub(rf"(?<![A-Za-z0-9-]){re.escape(label)}(?:\.[A-Za-z0-9-]+)*(?![A-Za-z0-9-])", "HOST", text)
    if "." in domain:
        text = re.sub(rf"(?<![A-Za-z0-9-])(?:[A-Za-z0-9-]+\.)*{re.escape(domain)}(?![A-Za-z0-9-])", "HOST", text)
    if _is_telling(user := _user()):
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(user)}(?![A-Za-z0-9])", "USER", text)
    return _ADDRESS.sub("ADDRESS", text)


def _is_telling(name: str) -> bool:
    """Return whether a name is one that is no word by chance."""
    return name not in _NOBODY and (len(name) >= 4 or any(letter.isdigit() for letter in name))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a number without a name, as in a container
        return ""


class Transcript:
    """The lines of one run: what is said is printed, what is noted is printed only when asked for."""

    def __init__(self, roots: Iterable[Path], show: Callable[[str], None], *, verbose: bool = False) -> None:
        """Begin with nothing said.

        Args:
            roots: see `without_paths`; the folders of `sys.path` are added.
            show: prints a line.
            verbose: whether to print what is noted, too.
        """
        self._roots = (*roots, *(Path(entry) for entry in sys.path if entry))
        self._show = show
        self._verbose = verbose
        self._lines: list[str] = []

    def say(self, line: str) -> None:
        """Keep one line of our own words and print it. Words of others in it have been cleaned."""
        self._lines.append(without_paths(_one_line(line), self._roots))
        self._show(self._lines[-1])

    def note(self, line: str, *, show: bool = False) -> None:
        """Keep one line, such as one that upstream printed; print it when asked to."""
        self._lines.append(self.clean(_one_line(line)))
        if self._verbose or show:
            self._show(self._lines[-1])

    def clean(self, text: str) -> str:
        """Return words of others as they may be said."""
        return scrub(text, self._roots)

    @property
    def text(self) -> str:
        """Everything that was kept."""
        return "".join(f"{line}\n" for line in self._lines)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())
