"""Transcript of a reproducer run, printed and kept, without paths and names of a host.

Paths are removed from every line. The names of the host and of the user, and addresses, are removed from third-party text:
the output of upstream and the words of a case. The package's own words stay, also on a host that has the name of one.
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
_NO_PERSON = {"localhost", "root"}


def paths_in(text: str) -> list[str]:
    """Return the absolute paths in a text."""
    return _ABSOLUTE.findall(text)


def scrub(text: str, roots: Iterable[Path] = ()) -> str:
    """Return a third-party text without absolute paths, names of this host and its user, and addresses.

    Args:
        text: any text.
        roots: see `without_paths`.
    """
    return _without_names(without_paths(text, roots))


def without_paths(text: str, roots: Iterable[Path] = ()) -> str:
    """Return a text without absolute paths and colours, with characters that cannot be encoded as escapes.

    Args:
        text: any text.
        roots: folders whose files keep their relative path, such as `liger_kernel/ops/x.py`; other files keep only the
            last part of their path.
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
    # `/tmp` may be the middle of a relative path; a root of several names is the root after any text.
    return "" if root.count("/") > 1 else _BEFORE


def _last(found: re.Match[str]) -> str:
    below = found[0].rstrip("/").rpartition("/")[2]
    own = {root.rpartition("/")[2] for root in _own_folders()}
    return "..." if below in own else f".../{below}"


def _own_folders() -> list[str]:
    """Return the folders whose names identify this machine or its user, the longest first; the home folder also without its first slash."""
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
    """Return whether a name identifies a host or user, and is unlikely to be an ordinary word."""
    return name not in _NO_PERSON and (len(name) >= 4 or any(letter.isdigit() for letter in name))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a number without a name, as in a container
        return ""


class Transcript:
    """Lines of one run. `say` prints a line; `note` prints it only on request."""

    def __init__(self, roots: Iterable[Path], show: Callable[[str], None], *, verbose: bool = False) -> None:
        """Begin without lines.

        Args:
            roots: see `without_paths`; the folders of `sys.path` are added.
            show: prints a line.
            verbose: whether to print the lines of `note`, too.
        """
        self._roots = (*roots, *(Path(entry) for entry in sys.path if entry))
        self._show = show
        self._verbose = verbose
        self._lines: list[str] = []

    def say(self, line: str) -> None:
        """Keep and print one line of the package's own words. Third-party text in it is cleaned already."""
        self._lines.append(without_paths(_one_line(line), self._roots))
        self._show(self._lines[-1])

    def note(self, line: str, *, show: bool = False) -> None:
        """Keep one line, such as one that upstream printed; print it on request."""
        self._lines.append(self.clean(_one_line(line)))
        if self._verbose or show:
            self._show(self._lines[-1])

    def clean(self, text: str) -> str:
        """Return a third-party text in the form that a transcript may have."""
        return scrub(text, self._roots)

    @property
    def text(self) -> str:
        """All kept lines."""
        return "".join(f"{line}\n" for line in self._lines)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())
