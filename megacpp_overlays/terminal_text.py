"""Escaping of untrusted text for terminals and logs: control characters have no effect there.

File names, metadata, the answers of an index or of a host, exceptions of upstream and the statements of other ranks may hold
escape sequences, which clear or forge the content of a terminal, and line ends, which forge lines of a log. All such text is
written through this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TextIO


def one_line(text: str) -> str:
    """Return a text with every non-printable character escaped, line ends too: `\\x1b`, `\\n`."""
    return text if text.isprintable() else "".join(map(_shown, text))


def lines(text: str) -> str:
    """Return a text escaped as by `one_line`, but with its line ends and tabs kept."""
    return text if text.isprintable() else "".join(each if each in "\n\t" else _shown(each) for each in text)


def _shown(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


class PlainStream:
    """A text stream that writes only printable characters, line ends and tabs; all others are escaped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text. Characters that the stream cannot encode are escaped as well."""
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(lines(text).encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def write_in_colour(self, text: str, colour: str) -> None:
        """Write a text between the escape sequences of a colour, the only sequences that are written unescaped.

        Args:
            text: escaped like any other text.
            colour: parameters of "select graphic rendition", such as `1;31`.
        """
        self._stream.write(f"\x1b[{colour}m")
        self.write(text)
        self._stream.write("\x1b[0m")

    def writelines(self, texts: Iterable[str]) -> None:
        """Write texts."""
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
