"""The one way to put words of others on a terminal or into a log: no character of theirs does anything there.

File names, metadata, the answers of an index or of a host, exceptions of upstream and what other ranks say may hold escape
sequences, which clear or forge what a terminal shows, and line ends, which forge lines of a log.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TextIO


def one_line(text: str) -> str:
    """Return a text in which every character that is none to be seen is escaped, line ends too: `\\x1b`, `\\n`."""
    return text if text.isprintable() else "".join(map(_shown, text))


def lines(text: str) -> str:
    """Return a text as `one_line` does, but with its line ends and tabs."""
    return text if text.isprintable() else "".join(each if each in "\n\t" else _shown(each) for each in text)


def _shown(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


class PlainStream:
    """A stream of text to which nothing is written but characters to be seen, line ends and tabs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, with what the stream cannot encode escaped as well."""
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(lines(text).encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def write_in_colour(self, text: str, colour: str) -> None:
        """Write a text between the escape sequences of a colour, the only ones that get through.

        Args:
            text: escaped as any other.
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
